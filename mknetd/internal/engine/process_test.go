package engine

import (
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// sleeper starts a process that does nothing and returns its exact identity.
func sleeper(t *testing.T) (*exec.Cmd, endpoint.Process) {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	start, err := startTime(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, endpoint.Process{PID: cmd.Process.Pid, StartTime: start}
}

func TestProcessIsKilledAndProvenDead(t *testing.T) {
	_, who := sleeper(t)
	p, err := openProcess(who)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if !p.alive() {
		t.Error("a running process is not alive")
	}
	if !p.kill(t.Context()) {
		t.Error("the death of a killed process is not proven")
	}
	if p.alive() {
		t.Error("a killed process is alive") // nobody has reaped it: a zombie is dead
	}
}

func TestProcessOfAnotherStartTimeIsGone(t *testing.T) {
	_, who := sleeper(t)
	who.StartTime++
	if _, err := openProcess(who); !errors.Is(err, errGone) {
		t.Errorf("a reused PID: got %v, want errGone", err)
	}
}

func TestProcessThatEndedIsGone(t *testing.T) {
	cmd, who := sleeper(t)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if _, err := openProcess(who); !errors.Is(err, errGone) {
		t.Errorf("got %v, want errGone", err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	_, who := sleeper(t)
	p, err := openProcess(who)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the context's error", err)
	}
	if !p.alive() {
		t.Error("waiting ended the process")
	}
}

// A process of which mknetd can open nothing, or only half, is not proven dead.
func TestWithoutDescriptorsNobodyIsDead(t *testing.T) {
	_, who := sleeper(t)
	ep := endpoint.Endpoint{Generation: endpoint.NewGeneration(), State: endpoint.Ready, Binding: &endpoint.Binding{Shim: &who}}
	ctx, cancel := context.WithCancel(t.Context())
	e := &Engine{log: slog.New(slog.DiscardHandler), shims: map[endpoint.Generation]*shimWatch{}, ctx: ctx}
	for spare := range 2 {
		restore := netlab.Exhaust(t, spare)
		p, err := openProcess(who)
		live := e.liveShim(ep)
		resumed := e.resumeShim(ctx, ep)
		restore()
		if p != nil || !errors.Is(err, unix.EMFILE) {
			t.Errorf("%d descriptors to spare: got %v, %v; want EMFILE", spare, p, err)
		}
		if live == nil {
			t.Errorf("%d descriptors to spare: a living shim counts as dead", spare)
		}
		if resumed != nil || e.watches(ep.Generation) {
			t.Errorf("%d descriptors to spare: watched %t, %v", spare, e.watches(ep.Generation), resumed)
		}
	}
	if err := e.resumeShim(ctx, ep); err != nil || !e.watches(ep.Generation) {
		t.Errorf("with descriptors again: watched %t, %v", e.watches(ep.Generation), err)
	}
	cancel()
	e.work.Wait()
}

// Process IDs and start times count from a boot: those of another one name somebody
// else, who is neither a shim nor killed as one.
func TestNoShimIsOfAnotherBoot(t *testing.T) {
	_, who := sleeper(t)
	ep := endpoint.Endpoint{
		Generation: endpoint.NewGeneration(), State: endpoint.Ready,
		Namespace: endpoint.Namespace{BootID: "before"}, Binding: &endpoint.Binding{Shim: &who},
	}
	e := &Engine{bootID: "now", log: slog.New(slog.DiscardHandler), shims: map[endpoint.Generation]*shimWatch{}, ctx: t.Context(), events: newEventLog()}
	if shim := e.liveShim(ep); shim != nil {
		t.Errorf("live shim %+v", shim)
	}
	if err := e.resumeShim(t.Context(), ep); err != nil || e.watches(ep.Generation) {
		t.Errorf("watched %t, %v", e.watches(ep.Generation), err)
	}
	if !e.killShimLocked(t.Context(), ep) {
		t.Error("the shim of another boot is not proven dead")
	}
	p, err := openProcess(who)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if !p.alive() {
		t.Error("a stranger was killed")
	}
}
