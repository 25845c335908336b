package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mknet/tests/twokernel/wire"
)

// controlPort is the driver's serial line; the first one is the console.
const controlPort = "/dev/ttyS1"

// control answers the driver until the line ends.
func control() error {
	line, err := os.OpenFile(controlPort, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer line.Close()
	if err := makeRaw(line); err != nil {
		return fmt.Errorf("%s: %w", controlPort, err)
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return err
	}
	out := json.NewEncoder(line)
	if err := out.Encode(wire.Reply{Output: unix.ByteSliceToString(name.Release[:])}); err != nil {
		return err
	}
	in := json.NewDecoder(line)
	programs := map[string]*program{}
	for {
		var q wire.Request
		if err := in.Decode(&q); err != nil {
			return fmt.Errorf("%s: %w", controlPort, err)
		}
		r, err := answer(programs, q)
		r.ID = q.ID
		if err != nil {
			r.Error = err.Error()
		}
		if err := out.Encode(r); err != nil {
			return err
		}
	}
}

// makeRaw turns off everything that a terminal does to bytes.
func makeRaw(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	e := raw.Control(func(fd uintptr) {
		var t *unix.Termios
		if t, err = unix.IoctlGetTermios(int(fd), unix.TCGETS); err != nil {
			return
		}
		t.Iflag, t.Oflag, t.Lflag = 0, 0, 0
		t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB|unix.CRTSCTS) | unix.CS8 | unix.CREAD | unix.CLOCAL
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
		err = unix.IoctlSetTermios(int(fd), unix.TCSETS, t)
	})
	return errors.Join(e, err)
}

// program is one in the background.
type program struct {
	cmd  *exec.Cmd
	done chan struct{} // closed once it has ended and is reaped
}

func answer(programs map[string]*program, q wire.Request) (wire.Reply, error) {
	switch q.Op {
	case wire.Run:
		return run(q)
	case wire.Start:
		return wire.Reply{}, start(programs, q)
	case wire.Write:
		return wire.Reply{}, writeFile(q)
	case wire.Signal, wire.Wait:
		p := programs[q.Name]
		if p == nil {
			return wire.Reply{}, fmt.Errorf("no program %q was started", q.Name)
		}
		if q.Op == wire.Signal {
			return wire.Reply{}, p.cmd.Process.Signal(syscall.Signal(q.Signal))
		}
		select {
		case <-p.done:
			return wire.Reply{Ended: true, Status: status(p.cmd.ProcessState)}, nil
		case <-time.After(q.Limit):
			return wire.Reply{}, nil
		}
	}
	return wire.Reply{}, fmt.Errorf("unknown operation %q", q.Op)
}

// run runs one command line. Its descendants may hold the output open after it
// has ended; they are not waited for.
func run(q wire.Request) (wire.Reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), q.Limit)
	defer cancel()
	var out strings.Builder
	cmd := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", q.Line)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	text := out.String()
	r := wire.Reply{Output: text[max(0, len(text)-wire.MaxOutput):]}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return r, fmt.Errorf("not done within %s", q.Limit)
	case errors.As(err, &exit):
		r.Status = status(exit.ProcessState)
		return r, nil
	}
	return r, err
}

func start(programs map[string]*program, q wire.Request) error {
	if p := programs[q.Name]; p != nil {
		select {
		case <-p.done:
		default:
			return fmt.Errorf("program %q still runs", q.Name)
		}
	}
	log, err := os.OpenFile(wire.LogPath(q.Name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p := &program{cmd: exec.Command(q.Argv[0], q.Argv[1:]...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		return err
	}
	programs[q.Name] = p
	go func() {
		_ = p.cmd.Wait() // ProcessState has what it says
		close(p.done)
	}()
	return nil
}

// status is the exit status as a shell has it.
func status(s *os.ProcessState) int {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return s.ExitCode()
}

func writeFile(q wire.Request) error {
	if err := os.WriteFile(q.Path, q.Data, os.FileMode(q.Mode)); err != nil {
		return err
	}
	return os.Chmod(q.Path, os.FileMode(q.Mode)) // whatever the umask
}
