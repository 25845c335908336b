// Package input reads what a runtime writes to a plugin's standard input, bounded
// in size and in time. It imports little, for the sake of package version.
package input

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// MaxBytes bounds the network configuration.
const MaxBytes = 1 << 20

// ErrTooLarge is returned for an input above MaxBytes; nothing of it is used. Every
// other error is one of reading.
var ErrTooLarge = fmt.Errorf("network configuration has more than %d bytes", MaxBytes)

// Read reads the descriptor to its end. It gives up when nothing comes for the
// time given: a caller that forgets to close the pipe must not hang us.
func Read(fd int, silence time.Duration) ([]byte, error) {
	return ReadUntil(fd, silence, func([]byte) bool { return false })
}

// IsTerminal reports whether a person sits at the descriptor.
func IsTerminal(fd int) bool {
	_, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	return err == nil
}

// ReadUntil is Read that stops as soon as enough says so of what has come. With an
// error it returns what came before it.
func ReadUntil(fd int, silence time.Duration, enough func([]byte) bool) ([]byte, error) {
	var data []byte
	buf := make([]byte, 16<<10) // most configurations fit
	deadline := time.Now().Add(silence)
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return data, fmt.Errorf("standard input was not closed within %s; mk-cni expects the network configuration there", silence)
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return data, fmt.Errorf("wait for standard input: %w", err)
		}
		if n <= 0 {
			continue
		}
		n, err = unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return data, fmt.Errorf("read standard input: %w", err)
		case n == 0:
			return data, nil
		}
		data = append(data, buf[:n]...)
		if len(data) > MaxBytes {
			return nil, ErrTooLarge
		}
		if enough(data) {
			return data, nil
		}
		deadline = time.Now().Add(silence)
	}
}

// AsFile returns an unnamed file with the content, at its start.
func AsFile(data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("stdin", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("keep standard input: %w", err)
	}
	f := os.NewFile(uintptr(fd), "stdin")
	if _, err := f.WriteAt(data, 0); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("keep standard input: %w", err)
	}
	return f, nil
}
