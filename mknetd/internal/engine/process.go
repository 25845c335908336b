package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// killWait is how long a killed shim may take to be gone. A process that hangs
// in the kernel longer than this is not proven dead, and its TUN is replaced.
const killWait = 2 * time.Second

// errGone says that the process is not there any more: it ended, or its PID
// belongs to another one now.
var errGone = errors.New("process is gone")

// process is a handle on exactly one process, safe against PID reuse. The zero
// value is not usable; close releases it.
type process struct {
	who endpoint.Process
	fd  *os.File // a pidfd, registered with the poller
}

// openProcess takes a handle on who. errGone when it has ended.
func openProcess(who endpoint.Process) (*process, error) {
	fd, err := unix.PidfdOpen(who.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		// EINVAL is what a PID gives that is now only a thread's.
		if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
			return nil, errGone
		}
		return nil, fmt.Errorf("open process %d: %w", who.PID, err)
	}
	p := &process{who: who, fd: os.NewFile(uintptr(fd), "pidfd")}
	// The handle now pins whatever has the PID; the start time tells whether it is
	// the one that was recorded.
	start, err := startTime(who.PID)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ESRCH), err == nil && start != who.StartTime:
		p.close()
		return nil, errGone
	case err != nil: // without a descriptor to spare nothing is proven
		p.close()
		return nil, fmt.Errorf("start time of process %d: %w", who.PID, err)
	}
	return p, nil
}

func (p *process) close() { p.fd.Close() }

// alive reports whether the process still runs. A zombie does not: its
// descriptors are closed already.
func (p *process) alive() bool {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return false
	}
	running := true
	if err := conn.Control(func(fd uintptr) { running = !readable(fd) }); err != nil {
		return false
	}
	return running
}

// wait returns nil once the process has ended, or ctx's error.
func (p *process) wait(ctx context.Context) error {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = p.fd.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	// A pidfd becomes readable when its process ends (pidfd_open(2)).
	err = conn.Read(readable)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// kill ends the process and reports whether its death is proven.
func (p *process) kill(ctx context.Context) bool {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return false
	}
	_ = conn.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWait)
	defer cancel()
	return p.wait(ctx) == nil
}

// readable is poll(2) with no time-out.
func readable(fd uintptr) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return n == 1
	}
}

// startTime is field 22 of /proc/PID/stat, in clock ticks since boot.
func startTime(pid int) (uint64, error) {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	// The command in parentheses may hold anything, so count from its end.
	_, rest, ok := strings.Cut(string(raw[max(0, strings.LastIndexByte(string(raw), ')')):]), " ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat: unexpected form", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
