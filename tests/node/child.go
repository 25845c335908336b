package node

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// Child is a child kernel, played by a network namespace with its own mk-agent.
type Child struct {
	*netlab.Namespace
	Endpoint   endpoint.Endpoint
	Sandbox    endpoint.Sandbox
	ResolvConf string

	n           *Node
	dir         string
	agent, shim *process
}

// Boot starts a child with its agent, and the shim that joins it to the endpoint,
// and returns once packets pass.
func (n *Node) Boot(t testing.TB, ep endpoint.Endpoint, generation string) *Child {
	t.Helper()
	c := n.BootAlone(t, ep, generation)
	c.StartShim(t)
	c.WaitLink(t)
	return c
}

// BootAlone starts a child without a shim.
func (n *Node) BootAlone(t testing.TB, ep endpoint.Endpoint, generation string) *Child {
	t.Helper()
	ns := netlab.New(t)
	dir, err := os.MkdirTemp(n.Dir, "child-")
	if err != nil {
		t.Fatal(err)
	}
	c := &Child{
		Namespace: ns, Endpoint: ep, n: n, dir: dir, ResolvConf: dir + "/resolv.conf",
		Sandbox: endpoint.Sandbox{ID: "sandbox-" + ep.ContainerID + "-" + ep.IfName, Generation: generation},
	}
	netlab.Run(t, n.Shim, "token", c.Token())
	c.SetIdentity(t, ep.Generation)
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range []string{"agent.log", "shim.log"} {
				if text, err := os.ReadFile(dir + "/" + name); err == nil {
					t.Logf("%s of %s:\n%s", name, c.Sandbox, tail(string(text), 10000))
				}
			}
		}
		c.Halt(t)
	})
	c.StartAgent(t)
	return c
}

// SetIdentity tells the agent whose endpoint the child is; it looks for every
// peer.
func (c *Child) SetIdentity(t testing.TB, gen endpoint.Generation) {
	t.Helper()
	identity, err := json.Marshal(map[string]string{"sandboxID": c.Sandbox.ID, "sandboxGeneration": c.Sandbox.Generation, "endpointGeneration": gen.String()})
	if err != nil {
		t.Fatal(err)
	}
	next := c.dir + "/identity.next"
	if err := os.WriteFile(next, identity, 0o400); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, c.dir+"/identity.json"); err != nil {
		t.Fatal(err)
	}
}

// Token is the path of the file that both sides authenticate with.
func (c *Child) Token() string { return c.dir + "/token" }

// Agent is the URL that the shim dials.
func (c *Child) Agent() string { return "unix://" + c.dir + "/agent.sock" }

// StartAgent starts mk-agent inside the child.
func (c *Child) StartAgent(t testing.TB) {
	t.Helper()
	p, err := start(c.dir+"/agent.log", nil, "nsenter", "--net="+c.Path(), "--", c.n.Programs.Agent, "run",
		"--listen", c.Agent(), "--identity", c.dir+"/identity.json", "--token", c.Token(), "--resolv-conf", c.ResolvConf)
	if err != nil {
		t.Fatal(err)
	}
	c.agent = p
}

// ShimArgs are the arguments of mk-shim for this child.
func (c *Child) ShimArgs() []string {
	return []string{
		"run", "--socket", c.n.Socket, "--endpoint", c.Endpoint.Generation.String(), "--sandbox-id", c.Sandbox.ID,
		"--sandbox-generation", c.Sandbox.Generation, "--agent", c.Agent(), "--token", c.Token(),
	}
}

// StartShim starts mk-shim for the child, with more flags if any.
func (c *Child) StartShim(t testing.TB, more ...string) {
	t.Helper()
	p, err := start(c.dir+"/shim.log", nil, append(append([]string{c.n.Shim}, c.ShimArgs()...), more...)...)
	if err != nil {
		t.Fatal(err)
	}
	c.shim = p
}

// WaitLink waits until the child reaches its gateway.
func (c *Child) WaitLink(t testing.TB) {
	t.Helper()
	netlab.Eventually(t, Patience, func() error {
		_, err := c.Try("ping", "-c1", "-W1", c.Endpoint.Gateway.String())
		return err
	})
}

// ShimPID is mk-shim's process ID.
func (c *Child) ShimPID() int { return c.shim.cmd.Process.Pid }

// SignalShim sends a signal to mk-shim.
func (c *Child) SignalShim(s syscall.Signal) { c.shim.signal(s) }

// KillShim ends mk-shim with SIGKILL.
func (c *Child) KillShim() {
	c.shim.signal(syscall.SIGKILL)
	<-c.shim.done
}

// StopShim ends mk-shim in order, which unbinds, and returns its exit error.
func (c *Child) StopShim() error { return c.shim.stop() }

// ShimEnded waits for mk-shim to end by itself and returns its exit status.
func (c *Child) ShimEnded(t testing.TB) int {
	t.Helper()
	netlab.Eventually(t, Patience, func() error {
		if !c.shim.ended() {
			return fmt.Errorf("mk-shim still runs")
		}
		return nil
	})
	return c.shim.cmd.ProcessState.ExitCode()
}

// AgentPID is mk-agent's process ID.
func (c *Child) AgentPID() int { return c.agent.cmd.Process.Pid }

// SignalAgent sends a signal to mk-agent.
func (c *Child) SignalAgent(s syscall.Signal) { c.agent.signal(s) }

// AgentLog is the file of mk-agent's log, of all agents of this child.
func (c *Child) AgentLog() string { return c.dir + "/agent.log" }

// KillAgent ends mk-agent with SIGKILL.
func (c *Child) KillAgent() {
	c.agent.signal(syscall.SIGKILL)
	<-c.agent.done
}

// Halt ends shim and agent, if they still run.
func (c *Child) Halt(t testing.TB) {
	t.Helper()
	for _, p := range []*process{c.shim, c.agent} {
		if p != nil && !p.ended() {
			_ = p.stop() // an exit status other than 0 is what some tests provoke
		}
	}
}
