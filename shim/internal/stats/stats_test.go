package stats

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestServe(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir, gen := filepath.Join(t.TempDir(), "mk-shim"), endpoint.NewGeneration()
	if _, err := Read(ctx, dir, gen); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no shim: got %v, want fs.ErrNotExist", err)
	}
	if got, err := List(dir); err != nil || len(got) != 0 {
		t.Errorf("List without a folder: %v, %v", got, err)
	}
	n := 0
	stop, err := Serve(ctx, dir, gen, func() any { n++; return map[string]int{"n": n} })
	if err != nil {
		t.Fatal(err)
	}
	// Somebody who connects and reads nothing does not keep others out.
	idle, err := net.Dial("unix", path(dir, gen))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	for range 2 {
		if b, err := Read(ctx, dir, gen); err != nil || !strings.Contains(string(b), `"n":`) {
			t.Errorf("Read: %s, %v", b, err)
		}
	}
	if got, err := List(dir); err != nil || len(got) != 1 || got[0] != gen {
		t.Errorf("List: %v, %v", got, err)
	}
	for p, mode := range map[string]os.FileMode{dir: fs.ModeDir | 0o700, path(dir, gen): fs.ModeSocket | 0o600} {
		if info, err := os.Stat(p); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v; want %v", p, info.Mode(), err, mode)
		}
	}
	// A second shim leaves the first one's socket alone, and removes that of a
	// killed one.
	killed := endpoint.NewGeneration()
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path(dir, killed), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := Serve(ctx, dir, endpoint.NewGeneration(), func() any { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path(dir, killed)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the killed shim's socket is left: %v", err)
	}
	second()
	if _, err := Read(ctx, dir, gen); err != nil {
		t.Errorf("after a second one has ended: %v", err)
	}
	stop()
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder is left: %v", err)
	}
}

// A shim that had no descriptor to spare for a while shows itself again.
func TestServesAgainAfterExhaustion(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir, gen := filepath.Join(t.TempDir(), "mk-shim"), endpoint.NewGeneration()
	stop, err := Serve(ctx, dir, gen, func() any { return "here" })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	restore := netlab.Exhaust(t, 0)
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: path(dir, gen)})
	// Nobody can accept it: no answer within 300 ms.
	n, pollErr := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 300)
	restore()
	if err != nil {
		t.Fatal(err)
	}
	if n > 0 {
		t.Fatal("answered without a descriptor")
	}
	if pollErr != nil && !errors.Is(pollErr, unix.EINTR) {
		t.Fatal(pollErr)
	}
	if b, err := Read(ctx, dir, gen); err != nil || !strings.Contains(string(b), "here") {
		t.Errorf("with descriptors again: %s, %v", b, err)
	}
}
