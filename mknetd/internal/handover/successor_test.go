package handover

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// successorEnv has the test binary be a successor: what it does, a space, the folder.
const successorEnv = "MKNET_TEST_SUCCESSOR"

func TestMain(m *testing.M) {
	if how, dir, is := strings.Cut(os.Getenv(successorEnv), " "); is {
		fmt.Fprintln(os.Stderr, "successor:", beSuccessor(how, dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// beSuccessor takes over, says so on its standard output, and does not end.
func beSuccessor(how, dir string) error {
	g, err := Ask(context.Background(), dir, Hello{PID: os.Getpid()})
	if err != nil {
		return err
	}
	if how == "serves" { // before it is asked to: its last word waits to be read
		if err := errors.Join(g.talk.send(message{Step: ready}), g.Serving()); err != nil {
			return err
		}
		fmt.Println("serves")
		select {}
	}
	if how == "stopped-early" {
		if err := g.talk.send(message{Step: ready}); err != nil {
			return err
		}
	} else if err := g.AwaitRelease(context.Background(), patience); err != nil {
		return err
	}
	lock, err := lockOf(dir)
	if err != nil {
		return err
	}
	fmt.Println("holds the store")
	if strings.HasPrefix(how, "stopped") {
		if err := unix.Kill(os.Getpid(), unix.SIGSTOP); err != nil {
			return err
		}
	}
	if how == "babbles" {
		if err := g.talk.send(message{Step: hello}); err != nil {
			return err
		}
	}
	time.Sleep(time.Hour)
	return lock.Close()
}

// lockOf takes the lock as package store does.
func lockOf(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// A successor that has the store and does not come to serve holds nobody up: it is
// ended for certain, and the store is free at once. One that serves is left alone, also
// where that was heard too late.
func TestReleasedToASuccessor(t *testing.T) {
	for _, tt := range []struct {
		how  string
		wait time.Duration // below 0: has passed already
		want string        // of the error; empty: none
	}{
		{"busy", time.Second, "killed process"},
		{"stopped", time.Second, "killed process"},
		{"stopped-early", time.Second, "killed process"},
		{"babbles", patience, "killed process"},
		{"serves", patience, ""},
		{"serves", -time.Second, ""},
	} {
		t.Run(fmt.Sprint(tt.how, " ", tt.wait), func(t *testing.T) {
			dir := t.TempDir()
			l, err := Listen(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), self)
			cmd.Env = append(os.Environ(), successorEnv+"="+tt.how+" "+dir)
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := sync.OnceValue(cmd.Wait)
			defer func() { _ = cmd.Process.Kill(); _ = ended() }()
			if err := l.unix.SetDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			r, err := l.Accept(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			if err := r.Grant(nil, nil); err != nil {
				t.Fatal(err)
			}
			if tt.how == "serves" || tt.how == "stopped-early" {
				said(t, out)
			}
			err = r.Released(tt.wait)
			if tt.want == "" {
				if err != nil {
					t.Errorf("it serves: %v", err)
				}
				if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
					t.Errorf("it serves and does not live: %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			lock, err := lockOf(dir)
			if err != nil {
				t.Fatalf("the store is not free: %v", err)
			}
			lock.Close()
		})
	}
}

func said(t *testing.T, out io.Reader) {
	t.Helper()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
}
