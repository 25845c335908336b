package tun

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/songgao/water"
	"golang.org/x/sys/unix"
)

// OpenPlain opens a queue without virtio-net headers, each read and write one
// complete packet: the fall-back where a kernel has no such headers, and the
// baseline of the benchmark. The device may exist, then it must be multi-queue.
// Whether it is persistent afterwards is the caller's to say, since the library
// always sets one or the other.
func OpenPlain(name string, persistent bool) (*Queue, error) {
	// The library opens without O_CLOEXEC: no child may start before it is set.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	ifce, err := water.New(water.Config{
		DeviceType:             water.TUN,
		PlatformSpecificParams: water.PlatformSpecificParams{Name: name, Persist: persistent, MultiQueue: true},
	})
	if err != nil {
		return nil, fmt.Errorf("tun %s: open without virtio-net header: %w", name, err)
	}
	f, ok := ifce.ReadWriteCloser.(*os.File)
	if !ok {
		return nil, errors.Join(fmt.Errorf("tun %s: opened as %T, want a file", name, ifce.ReadWriteCloser), ifce.Close())
	}
	q, err := wrap(f, ifce.Name(), false)
	if err != nil {
		return nil, err
	}
	if err := q.control("set close-on-exec", func(fd int) error { unix.CloseOnExec(fd); return nil }); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return q, nil
}
