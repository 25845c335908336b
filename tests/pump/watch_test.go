package pump

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// linkIndex is the interface index of mkn0.
func linkIndex(t *testing.T, ns *netlab.Namespace) string {
	t.Helper()
	index, _, _ := strings.Cut(ns.Run(t, "ip", "-o", "link", "show", "mkn0"), ":")
	return index
}

// shimStatus is the part of `mk-shim stats -o json` that tests read.
type shimStatus struct {
	Goroutines int  `json:"goroutines"`
	Sealed     bool `json:"sealed"`
	Counters   struct {
		RxPackets, TxPackets, Sessions uint64
	} `json:"counters"`
}

func shimStats(t *testing.T, n *node.Node, ep endpoint.Endpoint) shimStatus {
	t.Helper()
	var all []shimStatus
	out := netlab.Run(t, n.Shim, "stats", "-o", "json", "--endpoint", ep.Generation.String())
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 {
		t.Fatalf("mk-shim stats: %v\n%s", err, out)
	}
	return all[0]
}

// runShim runs mk-shim until it ends by itself.
func runShim(t *testing.T, n *node.Node, args ...string) (code int, output string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, n.Shim, args...).CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, string(out)
	case errors.As(err, &exit):
		return exit.ExitCode(), string(out)
	}
	t.Fatal(err)
	return 0, ""
}

// startShim starts mk-shim; the returned function waits for its end.
func startShim(t *testing.T, n *node.Node, args ...string) func(*testing.T) error {
	t.Helper()
	cmd := exec.Command(n.Shim, args...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	return func(t *testing.T) error {
		t.Helper()
		select {
		case err := <-done:
			return err
		case <-time.After(node.Patience):
			_ = cmd.Process.Kill()
			return fmt.Errorf("did not end: %w", <-done)
		}
	}
}

// unbind frees an endpoint whose shim ended without UNBIND.
func unbind(t *testing.T, n *node.Node, ep endpoint.Endpoint) {
	t.Helper()
	now := n.Endpoint(t, ep.Generation)
	if now == nil {
		t.Fatalf("endpoint %s is gone", ep.Generation)
	}
	if now.Binding == nil {
		return
	}
	if err := n.Client(t).Unbind(t.Context(), ep.Generation, api.UnbindRequest{Sandbox: now.Binding.Sandbox}); err != nil {
		t.Fatal(err)
	}
}

// counters returns what mknetd has; zero when it has none.
func counters(t *testing.T, n *node.Node, ep endpoint.Endpoint) api.Counters {
	t.Helper()
	rep, err := n.Client(t).Counters(t.Context(), ep.Generation)
	if err != nil && api.CodeOf(err) != api.NotFound {
		t.Fatal(err)
	}
	return rep.Counters
}

// waitCounters waits until mknetd has more than before.
func waitCounters(t *testing.T, n *node.Node, ep endpoint.Endpoint, before api.Counters) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		if now := counters(t, n, ep); now.RxPackets <= before.RxPackets || now.Below(before) != "" {
			return fmt.Errorf("mknetd has %+v, had %+v", now, before)
		}
		return nil
	})
}

// counterWatch looks at an endpoint's counters again and again.
type counterWatch struct {
	cancel context.CancelFunc
	done   chan struct{}
	last   api.Counters // read after done is closed
	fault  string
}

// watchCounters fails the test when a counter that mknetd shows goes down.
func watchCounters(t *testing.T, n *node.Node, ep endpoint.Endpoint) *counterWatch {
	t.Helper()
	client := n.Client(t)
	ctx, cancel := context.WithCancel(t.Context())
	w := &counterWatch{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		for ctx.Err() == nil {
			if rep, err := client.Counters(ctx, ep.Generation); err == nil {
				if below := rep.Counters.Below(w.last); below != "" {
					w.fault = below
				}
				w.last = rep.Counters
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-w.done })
	return w
}

func (w *counterWatch) stop(t *testing.T) api.Counters {
	t.Helper()
	w.cancel()
	<-w.done
	if w.fault != "" {
		t.Errorf("a counter went down: %s", w.fault)
	}
	return w.last
}
