package engine

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

// deferredEntry is a DEL that was queued for the daemon of that socket.
func deferredEntry(socket string) delqueue.Entry {
	return delqueue.Entry{
		Attachment: endpoint.Attachment{Network: "n", ContainerID: "c", IfName: "eth0"}, Generation: endpoint.NewGeneration(),
		BootID: "00000000-0000-4000-8000-000000000000", Daemon: "unix://" + socket, QueuedAt: time.Now().Add(-time.Hour),
	}
}

// Files that no replay will ever act on hold no ADD up.
func TestUnusableDeferredDelsDoNotWait(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "queue")
	e := &Engine{cfg: Config{DeferredDir: dir, Socket: filepath.Join(t.TempDir(), "mknetd.sock")}, log: slog.New(slog.DiscardHandler)}
	q, err := delqueue.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if err := q.Enqueue(deferredEntry(e.cfg.Socket)); err != nil {
		t.Fatal(err)
	}
	for range maxDeferred {
		name := strings.Repeat("0", 32) + "-" + endpoint.NewGeneration().String() + ".bad"
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n, oldest := e.queuedDels(); n != 1 || oldest < time.Hour {
		t.Errorf("%d deferred DELs wait, the oldest for %s; want 1 for an hour", n, oldest)
	}
	e.countDeferred()
	if err := e.tooManyDeferred(); err != nil {
		t.Error(err)
	}
}

// The folder of the socket may have been missing when the DEL was queued: it is then
// named by the path that mk-cni was given.
func TestDeferredDelIsForTheSocketWhateverItsName(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(dir+"/run/mknet", 0o755), os.Symlink("run", dir+"/varrun")); err != nil {
		t.Fatal(err)
	}
	real, linked := dir+"/run/mknet/mknetd.sock", dir+"/varrun/mknet/mknetd.sock"
	for _, ours := range []string{real, linked} {
		e := &Engine{cfg: Config{Socket: ours}}
		for _, theirs := range []string{real, linked} {
			if !e.meantForUs(deferredEntry(theirs)) {
				t.Errorf("mknetd at %s: a DEL for %s is not its own", ours, theirs)
			}
		}
		if e.meantForUs(deferredEntry(dir + "/run/mknetd.sock")) {
			t.Errorf("mknetd at %s takes another's DEL", ours)
		}
	}
}

// What a killed mk-cni left half written is removed at the start, once it is old.
func TestHalfWrittenDeferredDelsAreSwept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "queue")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	old, fresh := filepath.Join(dir, ".tmp-OLD"), filepath.Join(dir, ".tmp-FRESH")
	for _, f := range []string{old, fresh} {
		if err := os.WriteFile(f, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	hourAgo := time.Now().Add(-time.Hour)
	if err := os.Chtimes(old, hourAgo, hourAgo); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // one look is enough
	e := &Engine{cfg: Config{DeferredDir: dir}, log: slog.New(slog.DiscardHandler), ctx: ctx}
	e.replayDeferred()
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old one is left: %v", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Errorf("the fresh one, whose writer may live: %v", err)
	}
}
