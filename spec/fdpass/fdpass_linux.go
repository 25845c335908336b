// Package fdpass holds what every end of a Unix socket does that passes open files
// (SCM_RIGHTS, unix(7)).
package fdpass

import (
	"errors"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Send writes text together with the descriptors of files, in one message, and
// returns how much of text went; the descriptors go with its first byte. The files
// stay the caller's.
func Send(conn *net.UnixConn, text []byte, files ...*os.File) (n int, err error) {
	err = numbers(files, nil, func(fds []int) error {
		var oob []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		var err error
		n, _, err = conn.WriteMsgUnix(text, oob, nil)
		return err
	})
	return n, err
}

// numbers calls f with the raw numbers, which stay valid while it runs. Fd would
// make the files blocking, for every process that has them.
func numbers(files []*os.File, fds []int, f func([]int) error) error {
	if len(files) == 0 {
		return f(fds)
	}
	conn, err := files[0].SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = conn.Control(func(fd uintptr) { inner = numbers(files[1:], append(fds, int(fd)), f) })
	return errors.Join(err, inner)
}

// Room is how long the buffer must be that ReadMsgUnix fills, for so many
// descriptors. The kernel drops those beyond and says so (MSG_CTRUNC).
func Room(files int) int { return unix.CmsgSpace(4 * files) }

// Received returns the files of a received control message, which are the caller's
// also where there is an error. They are close-on-exec where ReadMsgUnix filled oob.
func Received(oob []byte, name string) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // credentials, a time stamp: nothing that needs closing
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), name))
		}
	}
	return files, nil
}
