package cli

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/handover"
	"mknet/tests/netlab"
)

// spoken is a log that passes on when something was said.
type spoken struct {
	slog.Handler
	when chan time.Time
}

func (s spoken) Enabled(context.Context, slog.Level) bool { return true }

func (s spoken) Handle(_ context.Context, r slog.Record) error {
	select {
	case s.when <- r.Time:
	default:
	}
	return nil
}

// Without a descriptor to spare the same caller cannot be accepted again and again:
// it is not tried, and logged, as fast as the machine can.
func TestTakeoverThatCannotBeAcceptedWaits(t *testing.T) {
	dir := t.TempDir()
	l, err := handover.Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	log := spoken{slog.DiscardHandler, make(chan time.Time, 64)}
	s := &service{log: slog.New(log)}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	restore := netlab.Exhaust(t, 0)
	defer restore()
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, handover.FileName)}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan *handover.Request, 1)
	go func() { ended <- s.successor(ctx, nil, &control{Listener: l}) }()
	var said []time.Time
	for len(said) < 3 {
		select {
		case at := <-log.when:
			said = append(said, at)
		case <-time.After(time.Minute):
			t.Fatal("nothing more is said")
		}
	}
	if d := said[2].Sub(said[0]); d < 3*firstAcceptWait {
		t.Errorf("three attempts within %s, want waits of %s and twice that in between", d, firstAcceptWait)
	}
	cancel()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	select {
	case r := <-ended:
		if r != nil {
			t.Errorf("took over: %+v", r)
		}
	case <-time.After(time.Minute):
		t.Fatal("it does not end with its context")
	}
}
