package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// A cache entry of an endpoint that is gone must not delete the one that the
// same attachment got since.
func TestStaleCacheCannotDeleteANewerEndpoint(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	first := n.Add(t, "c1", pod, "eth0")
	entries, err := filepath.Glob(n.Dir + "/cache/*")
	if err != nil || len(entries) == 0 {
		t.Fatalf("no cache entry after ADD: %v", err)
	}
	saved := map[string][]byte{}
	for _, name := range entries {
		if saved[name], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Del(t, first); err != nil {
		t.Fatal(err)
	}
	second := n.Add(t, "c1", pod, "eth0")
	if second.Generation == first.Generation {
		t.Fatal("both endpoints have the same generation")
	}
	for name, text := range saved { // the old cache comes back
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_ = n.Del(t, second) // whatever it answers, the newer endpoint stands
	if n.Endpoint(t, second.Generation) == nil {
		t.Fatal("the stale cache deleted the newer endpoint")
	}
	ctx := t.Context()
	if _, err := n.Client(t).DeleteEndpoint(ctx, first.Generation); err != nil {
		t.Errorf("DEL of the old generation: %v", err)
	}
	if n.Endpoint(t, second.Generation) == nil {
		t.Fatal("DEL of the old generation deleted the newer endpoint")
	}
}

// A shim of an older sandbox generation can neither unbind nor attach to the
// endpoint once a newer one is bound.
func TestStaleShimCannotUnbindOrAttach(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	c, ctx := n.Client(t), t.Context()
	older, newer := endpoint.Sandbox{ID: "s1", Generation: "g1"}, endpoint.Sandbox{ID: "s1", Generation: "g2"}
	first, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: older})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: newer}); api.CodeOf(err) != api.FailedPrecondition {
		t.Errorf("BIND to another sandbox generation while bound: got %v, want FAILED_PRECONDITION", err)
	}
	again, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: older})
	if err != nil {
		t.Errorf("BIND of the same sandbox generation again: %v", err)
	}
	if again.Nonce == first.Nonce {
		t.Error("both BINDs gave the same nonce")
	}
	if err := c.Unbind(ctx, ep.Generation, api.UnbindRequest{Sandbox: older}); err != nil {
		t.Fatal(err)
	}
	bound, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: newer})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Unbind(ctx, ep.Generation, api.UnbindRequest{Sandbox: older}); api.CodeOf(err) != api.StaleGeneration {
		t.Errorf("stale UNBIND: got %v, want STALE_GENERATION", err)
	}
	for name, req := range map[string]api.AttachRequest{
		"stale sandbox":      {Sandbox: older, Nonce: bound.Nonce, Queues: 1},
		"stale nonce":        {Sandbox: newer, Nonce: again.Nonce, Queues: 1},
		"nonce of the first": {Sandbox: newer, Nonce: first.Nonce, Queues: 1},
		"no nonce":           {Sandbox: newer, Queues: 1},
	} {
		if _, files, err := c.Attach(ctx, ep.Generation, req); api.CodeOf(err) != api.StaleGeneration && api.CodeOf(err) != api.InvalidArgument {
			t.Errorf("%s: ATTACH gave %d descriptors and %v", name, len(files), err)
		}
	}
	if got := n.Endpoint(t, ep.Generation); got.Binding == nil || got.Binding.Sandbox != newer {
		t.Errorf("binding is %v, want %s", got.Binding, newer)
	}
}

// A descriptor of the TUN that a former sandbox's shim kept open carries nothing
// once a newer sandbox generation is bound.
func TestStaleDescriptorCarriesNothing(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	c, ctx := n.Client(t), t.Context()
	older, newer := endpoint.Sandbox{ID: "s1", Generation: "g1"}, endpoint.Sandbox{ID: "s1", Generation: "g2"}
	attach := func(s endpoint.Sandbox) []*os.File {
		t.Helper()
		bound, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: s})
		if err != nil {
			t.Fatal(err)
		}
		_, files, err := c.Attach(ctx, ep.Generation, api.AttachRequest{Sandbox: s, Nonce: bound.Nonce, Queues: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			for _, f := range files {
				f.Close()
			}
		})
		return files
	}
	stale := attach(older)[0]
	// The test process itself is the shim here: UNBIND comes from it, so that it
	// is not killed and keeps its descriptor.
	if err := c.Unbind(ctx, ep.Generation, api.UnbindRequest{Sandbox: older}); err != nil {
		t.Fatal(err)
	}
	attach(newer)
	if _, err := stale.Write(make([]byte, 38)); !errors.Is(err, unix.EBADFD) && !errors.Is(err, unix.EIO) {
		t.Errorf("write to the stale descriptor: got %v, want EBADFD", err)
	}
	_ = stale.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	buf := make([]byte, 2048)
	done := make(chan int, 1)
	go func() { k, _ := stale.Read(buf); done <- k }()
	_, _ = netlab.Try("ping", "-c1", "-W1", ep.Address.String())
	select {
	case k := <-done:
		if k > 0 {
			t.Errorf("the stale descriptor read %d bytes", k)
		}
	case <-time.After(node.Patience):
		t.Error("the stale descriptor blocks its reader for ever")
	}
}

// A DEL of an endpoint whose shim lives is refused as one to be tried again, and
// completes by itself after UNBIND.
func TestDelWaitsForTheShim(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	node.WantCode(t, n.Del(t, ep), 11, "mk-shim")
	if got := n.Endpoint(t, ep.Generation); got == nil || got.DeleteRequested == nil {
		t.Fatal("the refused DEL was not recorded")
	}
	if err := child.StopShim(); err != nil {
		t.Errorf("mk-shim: %v", err)
	}
	waitGone(t, n, ep)
	if err := n.Del(t, ep); err != nil {
		t.Errorf("DEL again: %v", err)
	}
}

// A shim that was killed does not stand in the way of DEL.
func TestDelOfADeadShimSucceeds(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	child.KillShim()
	if err := n.Del(t, ep); err != nil {
		t.Errorf("DEL: %v", err)
	}
	node.Gone(t, ep)
}

// A shim that dies after a refused DEL lets it complete.
func TestDelCompletesWhenTheShimDies(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	node.WantCode(t, n.Del(t, ep), 11, "alive")
	child.KillShim()
	waitGone(t, n, ep)
}

// After the grace period a shim that does not let go is fenced.
func TestDelFencesTheShimAfterTheGracePeriod(t *testing.T) {
	n := node.New(t, "shimGrace: 1s")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	node.WantCode(t, n.Del(t, ep), 11, "")
	child.ShimEnded(t)
	waitGone(t, n, ep)
}

// mknetd may die while a DEL waits for a shim: its successor goes on waiting.
func TestDelWaitsAcrossARestart(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	node.WantCode(t, n.Del(t, ep), 11, "")
	n.Kill(t)
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr) // the pump needs no daemon
	n.Start(t)
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	child.KillShim()
	waitGone(t, n, ep)
}

// A rebooted child is another sandbox generation: its shim joins once the old
// one is gone, on a TUN of its own.
func TestRebootedChildGetsTheEndpoint(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	old := n.Boot(t, ep, "g1")
	old.KillShim()
	old.KillAgent()
	child := n.Boot(t, ep, "g2")
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	// The old shim comes back and is refused.
	old.StartShim(t)
	if status := old.ShimEnded(t); status == 0 {
		t.Error("the stale shim exited 0")
	}
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
}

// After a reboot the process that has the PID and the start time of a recorded shim is
// somebody else, whom the release of the endpoint leaves alone. It is stopped here, so
// that it does not end by itself when its TUN goes.
func TestARebootKillsNoStranger(t *testing.T) {
	n := node.New(t)
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	child := n.Boot(t, ep, "g1")
	n.Kill(t)
	child.SignalShim(unix.SIGSTOP)
	defer child.KillShim()
	anotherBoot(t, n)
	n.Start(t)
	if n.Endpoint(t, ep.Generation) != nil {
		t.Error("the endpoint of the former boot is still recorded")
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child.ShimPID()))
	if err != nil || !strings.Contains(string(stat), "(mk-shim) T ") {
		t.Errorf("the process was not left alone: %v %s", err, stat)
	}
	n.Stop(t) // the next start is of the boot that is
}
