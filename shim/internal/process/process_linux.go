// Package process ties mk-shim to the process that needs it and sets its
// priority.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrEnded is the cause of a context that Until ended.
var ErrEnded = errors.New("the runtime has ended")

// Until returns a context that ends, with a cause that wraps ErrEnded, when the
// process does. It is followed by a pidfd and not by PR_SET_PDEATHSIG: that one
// fires when the thread that started us ends, which in a Go runtime may be long
// before the process does. Call release when done.
func Until(ctx context.Context, pid int) (_ context.Context, release func(), err error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = ErrEnded
		}
		return nil, nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), fmt.Sprintf("pidfd of %d", pid))
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("watch process %d: %w", pid, err), f.Close())
	}
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended := false
		// Read waits until the descriptor is readable, which a pidfd is once the
		// process has ended (pidfd_open(2)), or closed.
		_ = raw.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			ended = err == nil && n == 1
			return ended
		})
		if ended {
			cancel(fmt.Errorf("%w: process %d", ErrEnded, pid))
		}
	}()
	return ctx, func() {
		_ = f.Close() // wakes the goroutine
		<-done
		cancel(nil)
	}, nil
}

// UntilParent is Until for the process that started this one.
func UntilParent(ctx context.Context) (context.Context, func(), error) {
	parent := os.Getppid()
	ctx, release, err := Until(ctx, parent)
	if err == nil && os.Getppid() != parent { // it ended before the pidfd was open
		release()
		return nil, nil, fmt.Errorf("watch process %d: %w", parent, ErrEnded)
	}
	return ctx, release, err
}

// SetNice sets the nice value of every thread, -20 to 19. Threads that start
// later inherit it. setpriority(2) reaches a single thread only.
func SetNice(nice int) error {
	for pass := 0; pass < 3; pass++ { // a thread may start another meanwhile
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("set priority: %w", err)
		}
		for _, task := range tasks {
			tid, err := strconv.Atoi(task.Name())
			if err != nil {
				continue
			}
			if err := unix.Setpriority(unix.PRIO_PROCESS, tid, nice); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("set priority %d: %w", nice, err)
			}
		}
	}
	return nil
}
