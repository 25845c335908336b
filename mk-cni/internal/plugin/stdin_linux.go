package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
)

// maxStdinBytes bounds the network configuration.
const maxStdinBytes = 1 << 20

// readStdin reads standard input to its end. It gives up when nothing comes for
// the time given: a caller that forgets to close the pipe must not hang us.
func readStdin(fd int, silence time.Duration) ([]byte, error) {
	return readUntil(fd, silence, func([]byte) bool { return false })
}

// readVersionStdin reads what a caller of VERSION may have written. Nothing is
// required: at the first whole JSON value, at silence or on a terminal it is done.
func readVersionStdin(fd int) []byte {
	if _, err := unix.IoctlGetTermios(fd, unix.TCGETS); err == nil {
		return nil
	}
	data, _ := readUntil(fd, stdinSilenceVersion, json.Valid)
	return data
}

func readUntil(fd int, silence time.Duration, enough func([]byte) bool) ([]byte, error) {
	var data []byte
	buf := make([]byte, 16<<10) // most configurations fit
	deadline := time.Now().Add(silence)
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return data, types.NewError(types.ErrIOFailure, fmt.Sprintf("standard input was not closed within %s; mk-cni expects the network configuration there", silence), "")
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return data, types.NewError(types.ErrIOFailure, "wait for standard input: "+err.Error(), "")
		}
		if n <= 0 {
			continue
		}
		n, err = unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return data, types.NewError(types.ErrIOFailure, "read standard input: "+err.Error(), "")
		case n == 0:
			return data, nil
		}
		data = append(data, buf[:n]...)
		if len(data) > maxStdinBytes {
			return nil, types.NewError(types.ErrDecodingFailure, fmt.Sprintf("network configuration has more than %d bytes", maxStdinBytes), "")
		}
		if enough(data) {
			return data, nil
		}
		deadline = time.Now().Add(silence)
	}
}

// asFile returns an unnamed file with the content, at its start.
func asFile(data []byte) (*os.File, error) {
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
