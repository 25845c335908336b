package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"mknet/tests/twokernel/guest"
)

// machine is where commands run: a guest, or this machine.
type machine interface {
	Run(line string, limit time.Duration) (output string, status int, err error)
	Start(name string, argv ...string) error
	Signal(name string, s syscall.Signal) error
	Wait(name string, limit time.Duration) (status int, ended bool, err error)
	WriteFile(path string, data []byte, mode os.FileMode) error
	LogPath(name string) string
}

var _ machine = (*guest.Machine)(nil)

// local is this machine, inside the private host.
type local struct {
	logs     string
	programs map[string]*process
}

// process is one in the background.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

func newLocal(logs string) *local { return &local{logs: logs, programs: map[string]*process{}} }

func (l *local) LogPath(name string) string { return l.logs + "/" + name + ".log" }

func (l *local) Run(line string, limit time.Duration) (string, int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", line)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return out.String(), 0, fmt.Errorf("not done within %s", limit)
	case errors.As(err, &exit):
		return out.String(), exit.ExitCode(), nil
	}
	return out.String(), 0, err
}

func (l *local) Start(name string, argv ...string) error {
	log, err := os.OpenFile(l.LogPath(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p := &process{cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	l.programs[name] = p
	go func() {
		_ = p.cmd.Wait() // ProcessState has what it says
		close(p.done)
	}()
	return nil
}

func (l *local) Signal(name string, s syscall.Signal) error {
	p := l.programs[name]
	if p == nil {
		return fmt.Errorf("no program %q was started", name)
	}
	return p.cmd.Process.Signal(s)
}

func (l *local) Wait(name string, limit time.Duration) (int, bool, error) {
	p := l.programs[name]
	if p == nil {
		return 0, false, fmt.Errorf("no program %q was started", name)
	}
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode(), true, nil
	case <-time.After(limit):
		return 0, false, nil
	}
}

func (l *local) WriteFile(path string, data []byte, mode os.FileMode) error {
	if err := os.WriteFile(path, data, mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// close ends what still runs.
func (l *local) close() {
	for _, p := range l.programs {
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}
