package process

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestUntil(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, release, err := Until(t.Context(), cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if ctx.Err() != nil {
		t.Errorf("ended while the process lives: %v", context.Cause(ctx))
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
		t.Fatal("the end of the process was not seen")
	}
	if !errors.Is(context.Cause(ctx), ErrEnded) {
		t.Errorf("cause %v, want ErrEnded", context.Cause(ctx))
	}
	_ = cmd.Wait() // reaps; it was killed
	if _, _, err := Until(t.Context(), cmd.Process.Pid); !errors.Is(err, ErrEnded) {
		t.Errorf("a process that is gone: got %v, want ErrEnded", err)
	}
}

func TestReleaseDoesNotEndTheWatchedWork(t *testing.T) {
	ctx, release, err := UntilParent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release()
	if errors.Is(context.Cause(ctx), ErrEnded) {
		t.Error("release looks like the end of the parent")
	}
}

func TestSetNice(t *testing.T) {
	if err := SetNice(3); err != nil {
		t.Fatal(err)
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			t.Fatal(err)
		}
		// The system call answers 20 minus the nice value, getpriority(2).
		if got, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil && got != 17 {
			t.Errorf("thread %d has nice value %d, want 3", tid, 20-got)
		}
	}
}
