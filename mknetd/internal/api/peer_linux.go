package api

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// credentials are what the kernel says about the process that connected.
type credentials struct {
	unix.Ucred
	groups []uint32 // supplementary; only known where a group may call
}

// peerOf asks the kernel who connected (SO_PEERCRED, unix(7)).
func peerOf(c syscall.Conn) (credentials, error) {
	var cred credentials
	err := control(c, func(fd int) error {
		u, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			return fmt.Errorf("SO_PEERCRED: %w", err)
		}
		cred.Ucred = *u
		return nil
	})
	return cred, err
}

// admit says who connected and whether it may call. That it cannot be found out now
// is an error: whoever is taken for nobody stays it for the life of the connection.
func admit(c *net.UnixConn, gid int) (endpoint.Process, bool, error) {
	cred, err := peerOf(c)
	if err != nil {
		return endpoint.Process{}, false, err
	}
	var groups []uint32
	if gid >= 0 {
		if groups, err = groupsOf(int(cred.Pid)); err != nil {
			return endpoint.Process{}, false, err
		}
	}
	who, err := identify(c, cred)
	if err != nil {
		return endpoint.Process{}, false, err
	}
	if who.PID != 0 { // it still lives, so the groups that were read are its own
		cred.groups = groups
	}
	return who, cred.allowed(gid), nil
}

// allowed applies the rule of spec/api.md: root, our own user, or a member of the
// configured group (gid below 0: none).
func (c credentials) allowed(gid int) bool {
	if c.Uid == 0 || int(c.Uid) == os.Geteuid() {
		return true
	}
	if gid < 0 {
		return false
	}
	if int(c.Gid) == gid {
		return true
	}
	for _, g := range c.groups {
		if int(g) == gid {
			return true
		}
	}
	return false
}

// groupsOf reads the supplementary groups from /proc/PID/status; none of a process
// that is gone.
func groupsOf(pid int) ([]uint32, error) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return nil, unlessGone(err)
	}
	for line := range strings.Lines(string(raw)) {
		words, ok := strings.CutPrefix(line, "Groups:")
		if !ok {
			continue
		}
		var groups []uint32
		for _, w := range strings.Fields(words) {
			if g, err := strconv.ParseUint(w, 10, 32); err == nil {
				groups = append(groups, uint32(g))
			}
		}
		return groups, nil
	}
	return nil, nil
}

// identify names the peer process so that a reused PID is not taken for it. The
// PID is 0 where there is none to name: the process has ended, or lives in a PID
// namespace that we do not see. An error says nothing about the process.
func identify(c *net.UnixConn, cred credentials) (endpoint.Process, error) {
	who := endpoint.Process{UID: cred.Uid}
	if cred.Pid <= 0 {
		return who, nil
	}
	// The pidfd pins the process that connected (SO_PEERPIDFD, Linux 6.5); what
	// /proc says is about that one if it still lives afterwards.
	pidfd := -1
	err := control(c, func(fd int) (err error) {
		pidfd, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
		return err
	})
	switch {
	case err == nil:
		defer func() { _ = unix.Close(pidfd) }()
	case errors.Is(err, unix.ENOPROTOOPT): // an older kernel: trust the PID
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODATA): // reaped (pidfd_prepare, until Linux 6.15), or never had a PID
		return who, nil
	default:
		return who, unlessGone(os.NewSyscallError("SO_PEERPIDFD", err))
	}
	start, comm, err := readStat(int(cred.Pid))
	if err != nil {
		return who, unlessGone(err)
	}
	if pidfd >= 0 && errors.Is(unix.PidfdSendSignal(pidfd, 0, nil, 0), unix.ESRCH) {
		return who, nil
	}
	who.PID, who.StartTime, who.Comm = int(cred.Pid), start, comm
	return who, nil
}

// unlessGone is nil where err says that the process is gone.
func unlessGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// readStat reads start time (field 22, clock ticks since boot) and name of a
// process from /proc/PID/stat, proc_pid_stat(5). The name stands in parentheses
// and may itself hold any character.
func readStat(pid int) (start uint64, comm string, err error) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, "", err
	}
	text := string(raw)
	open, end := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || end < open {
		return 0, "", fmt.Errorf("/proc/%d/stat: has no name", pid)
	}
	fields := strings.Fields(text[end+1:]) // begins with field 3
	if len(fields) < 20 {
		return 0, "", fmt.Errorf("/proc/%d/stat: has only %d fields", pid, len(fields)+2)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return start, strings.ToValidUTF8(text[open+1:end], "?"), err
}
