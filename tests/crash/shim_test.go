package crash

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// shim is the life of mk-shim: it joins, finds a child that has a single-use
// token, tells its counters, loses the agent, finds it again, and ends in order.
// After each crash the runtime starts another one, which must carry packets.
var shim = story{name: "mk-shim-life", play: func(t *testing.T, n *node.Node, v *victim, o *outcome) {
	n.Start(t)
	c := newCaller(t, n)
	ep, err := c.add(t.Context(), n.Client(t), "eth0")
	if err != nil {
		t.Fatal(err)
	}
	k := newKernel(t, n, ep)
	k.startAgent(t)
	k.startShim(t, v.env("run")...)
	ended := k.live(t)
	switch {
	case v.at == nil && ended != nil && !errors.Is(ended, errInOrder):
		t.Fatalf("mk-shim without a crash: %v", ended)
	case killed(ended):
		o.Reached = true
	}
	if k.agent == nil {
		k.startAgent(t)
	}
	k.startShim(t)
	if err := k.carries(); err != nil {
		o.fault(acknowledged, "the next mk-shim carries nothing: %v", err)
	}
	judge(t, n, o, []endpoint.Generation{ep.Generation}, func() {
		if err := k.carries(); err != nil {
			o.fault(again, "mk-shim carries nothing any more: %v", err)
		}
		if err := k.stopShim(); !errors.Is(err, errInOrder) {
			o.fault(clean, "mk-shim did not end in order: %v", err)
		}
		c.deleteAll(t, o)
	})
}}

// errInOrder is the end of a mk-shim that exits 0.
var errInOrder = errors.New("ended in order")

// kernel is a child whose agent has its token from the kernel command line, good
// for one session, and the shim that serves it.
type kernel struct {
	n           *node.Node
	ns          *netlab.Namespace
	ep          endpoint.Endpoint
	sandbox     endpoint.Sandbox
	dir         string
	agent, shim *exec.Cmd
	shimEnd     chan error // receives once
}

func newKernel(t *testing.T, n *node.Node, ep endpoint.Endpoint) *kernel {
	t.Helper()
	k := &kernel{n: n, ns: netlab.New(t), ep: ep, sandbox: endpoint.Sandbox{ID: "s1", Generation: "g1"}, dir: shortDir(t, n)}
	netlab.Run(t, n.Shim, "token", k.dir+"/token")
	token, err := os.ReadFile(k.dir + "/token")
	if err != nil {
		t.Fatal(err)
	}
	digits := string(token)
	if len(token) == 32 {
		digits = hex.EncodeToString(token)
	}
	line := fmt.Sprintf("quiet mknet.sandbox=%s mknet.generation=%s mknet.endpoint=%s mknet.token=%.64s\n", k.sandbox.ID, k.sandbox.Generation, ep.Generation, digits)
	if err := os.WriteFile(k.dir+"/cmdline", []byte(line), 0o400); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		k.killAgent()
		if k.shim != nil {
			_ = k.stopShim()
		}
		if t.Failed() {
			for _, name := range []string{"agent.log", "shim.log"} {
				text, _ := os.ReadFile(k.dir + "/" + name)
				t.Logf("%s:\n%s", name, text)
			}
		}
	})
	return k
}

// command starts a program with its output in a log.
func (k *kernel) command(t *testing.T, log string, env []string, argv ...string) *exec.Cmd {
	t.Helper()
	cmd, err := spawn(k.dir+"/"+log, env, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// spawn starts a program with its output appended to a log. It dies with the test.
func spawn(log string, env []string, argv ...string) (*exec.Cmd, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Env = out, out, append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

func (k *kernel) startAgent(t *testing.T) {
	t.Helper()
	k.agent = k.command(t, "agent.log", nil, "nsenter", "--net="+k.ns.Path(), "--", k.n.Agent, "run", "--listen", "unix://"+k.dir+"/agent.sock",
		"--cmdline", k.dir+"/cmdline", "--state-dir", k.dir+"/agent", "--resolv-conf", k.dir+"/resolv.conf")
}

func (k *kernel) killAgent() {
	if k.agent != nil {
		_ = k.agent.Process.Kill()
		_ = k.agent.Wait() // killed
		k.agent = nil
	}
}

func (k *kernel) startShim(t *testing.T, env ...string) {
	t.Helper()
	k.shim = k.command(t, "shim.log", env, k.n.Shim, "run", "--socket", k.n.Socket, "--endpoint", k.ep.Generation.String(),
		"--sandbox-id", k.sandbox.ID, "--sandbox-generation", k.sandbox.Generation, "--agent", "unix://"+k.dir+"/agent.sock",
		"--token", k.dir+"/token", "--stats-dir", k.dir+"/stats")
	cmd, end := k.shim, make(chan error, 1)
	k.shimEnd = end
	go func() {
		err := cmd.Wait()
		if err == nil {
			err = errInOrder
		}
		end <- err
	}()
}

// stopShim ends mk-shim with SIGTERM and returns how it ended.
func (k *kernel) stopShim() error {
	_ = k.shim.Process.Signal(syscall.SIGTERM) // it may have ended
	k.shim = nil
	select {
	case err := <-k.shimEnd:
		return err
	case <-time.After(node.Patience):
		return errors.New("does not end")
	}
}

// live is what the story does with the first shim. It returns how that ended.
func (k *kernel) live(t *testing.T) error {
	t.Helper()
	if err := k.carries(); err != nil {
		return err
	}
	counted := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
		defer cancel()
		_, err := k.n.Client(t).Counters(ctx, k.ep.Generation)
		if api.CodeOf(err) == api.NotFound {
			return err
		}
		return nil
	}
	if err := k.until(counted); err != nil {
		return err
	}
	k.killAgent()
	k.startAgent(t)
	if err := k.carries(); err != nil {
		return err
	}
	return k.stopShim()
}

// carries waits until the child reaches its gateway, or until the shim has ended,
// which is the error.
func (k *kernel) carries() error {
	return k.until(func() error {
		_, err := k.ns.Try("ping", "-c1", "-W1", k.ep.Gateway.String())
		return err
	})
}

func (k *kernel) until(f func() error) error {
	deadline := time.After(node.Patience)
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case end := <-k.shimEnd:
			k.shimEnd <- end
			return end
		case <-deadline:
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}
