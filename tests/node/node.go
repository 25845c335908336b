package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// Patience is how long a test waits for something that takes milliseconds on an
// idle machine.
const Patience = 60 * time.Second

// MTUBytes is the egress's MTU, as in the demo.
const MTUBytes = 1400

// Node is a private host with an internet and, usually, a running mknetd.
type Node struct {
	Programs
	Internet *netlab.Namespace // 198.51.100.1
	Dir      string            // everything that the node writes
	Socket   string
	Config   string // mknetd's configuration file
	// DeferredDir is the fixed folder of deferred DELs, on the private host's own
	// file system.
	DeferredDir string

	daemon    *process
	successor *process // see StartSuccessor
	client    *client.Client
}

// New makes a node and starts mknetd. Lines of config are added to the daemon's
// configuration file.
func New(t testing.TB, config ...string) *Node {
	t.Helper()
	n := Prepare(t, config...)
	n.Start(t)
	return n
}

// Prepare is New without a running mknetd.
func Prepare(t testing.TB, config ...string) *Node {
	t.Helper()
	programs := Build(t) // before the snapshot: it makes a folder
	netlab.Clean(t)
	dir, err := os.MkdirTemp("/run", "node-")
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{Programs: programs, Dir: dir, Socket: dir + "/mknetd.sock", Config: dir + "/config.yaml", DeferredDir: delqueue.DefaultDir}
	n.Internet = netlab.Uplink(t, fmt.Sprint(MTUBytes))
	n.Internet.AddRoute(t, netlab.Route{To: "172.30.0.0/16", Via: netlab.HostAddr, Link: "inet0"})
	text := fmt.Sprintf("socket: %s\nstateDir: %s\ndeferredDelDir: %s\npolicyDir: %s\n", n.Socket, dir+"/state", n.DeferredDir, dir+"/policy.d")
	for _, line := range config {
		text += line + "\n"
	}
	if err := os.WriteFile(n.Config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.tearDown(t) })
	return n
}

// tearDown deletes what the test left behind on purpose and removes the daemon's
// shared chains, so that netlab's comparison sees an empty host.
func (n *Node) tearDown(t testing.TB) {
	if t.Failed() {
		for _, name := range []string{"mknetd.log", "mk-cni.log"} {
			if text, err := os.ReadFile(n.Dir + "/" + name); err == nil {
				t.Logf("%s:\n%s", name, tail(string(text), 20000))
			}
		}
	}
	if n.daemon == nil || n.daemon.ended() {
		n.Start(t)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	c := n.Client(t)
	list, err := c.Endpoints(ctx, client.Filter{})
	if err != nil {
		t.Errorf("list endpoints: %v", err)
	}
	for _, ep := range list {
		if ep.Binding != nil { // the test itself may be the shim: nobody is to be fenced
			if err := c.Unbind(ctx, ep.Generation, api.UnbindRequest{Sandbox: ep.Binding.Sandbox}); err != nil {
				t.Errorf("unbind endpoint %s: %v", ep.Generation, err)
			}
		}
		if _, err := c.DeleteEndpoint(ctx, ep.Generation); err != nil {
			t.Errorf("delete endpoint %s: %v", ep.Generation, err)
		}
	}
	n.CheckInventory(t)
	n.Stop(t)
	if out, err := netlab.Try(n.Daemon, "purge", "--config", n.Config, "--yes"); err != nil {
		t.Errorf("mknetd purge: %v\n%s", err, out)
	}
	n.client.Close()
	// A killed shim leaves its statistics socket to the next one that starts.
	if err := os.RemoveAll("/run/mk-shim"); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(n.DeferredDir); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(n.Dir); err != nil {
		t.Errorf("remove the node's folder: %v", err)
	}
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }

// Start starts mknetd and returns once it serves. env are additional variables.
func (n *Node) Start(t testing.TB, env ...string) {
	t.Helper()
	if err := n.TryStart(t, env...); err != nil {
		t.Fatal(err)
	}
}

// TryStart is Start for a mknetd that may end before it serves, which is the
// error.
func (n *Node) TryStart(t testing.TB, env ...string) error {
	t.Helper()
	p, err := start(n.Dir+"/mknetd.log", env, n.Daemon, "serve", "--config", n.Config)
	if err != nil {
		t.Fatal(err)
	}
	n.daemon = p
	var ended error
	netlab.Eventually(t, Patience, func() error {
		if p.ended() {
			ended = fmt.Errorf("mknetd ended: %w", p.err())
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := n.Client(t).Health(ctx)
		return err
	})
	return ended
}

// Stop ends mknetd in order and fails the test when it does not exit 0.
func (n *Node) Stop(t testing.TB) {
	t.Helper()
	if err := n.daemon.stop(); err != nil {
		t.Errorf("mknetd: %v", err)
	}
}

// Kill ends mknetd with SIGKILL.
func (n *Node) Kill(t testing.TB) {
	t.Helper()
	n.daemon.signal(syscall.SIGKILL)
	<-n.daemon.done
}

// Signal sends a signal to mknetd.
func (n *Node) Signal(s syscall.Signal) { n.daemon.signal(s) }

// WaitDead waits for a mknetd that is expected to die by itself.
func (n *Node) WaitDead(t testing.TB) {
	t.Helper()
	select {
	case <-n.daemon.done:
	case <-time.After(Patience):
		t.Fatal("mknetd is still alive")
	}
}

// DaemonPID is mknetd's process ID.
func (n *Node) DaemonPID() int { return n.daemon.cmd.Process.Pid }

// Client is the node's client of its mknetd; it lives as long as the test.
func (n *Node) Client(t testing.TB) *client.Client {
	t.Helper()
	if n.client == nil {
		c, err := client.New("unix://" + n.Socket)
		if err != nil {
			t.Fatal(err)
		}
		n.client = c
	}
	return n.client
}

// Endpoint returns the daemon's record; nil when there is none.
func (n *Node) Endpoint(t testing.TB, gen endpoint.Generation) *endpoint.Endpoint {
	t.Helper()
	list := n.List(t)
	for i := range list {
		if list[i].Generation == gen {
			return &list[i]
		}
	}
	return nil
}

// List returns every record.
func (n *Node) List(t testing.TB) []endpoint.Endpoint {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	list, err := n.Client(t).Endpoints(ctx, client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// CheckInventory fails the test when `mknetd inventory` finds a difference
// between kernel and records.
func (n *Node) CheckInventory(t testing.TB) {
	t.Helper()
	if out, err := netlab.Try(n.Daemon, "inventory", "--config", n.Config); err != nil {
		t.Errorf("inventory is not clean: %v\n%s", err, out)
	}
}

// process is a program that runs until it is stopped.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	wait error // valid once done is closed
}

// start runs a program with its output appended to a log file. It dies with the
// test binary.
func start(log string, env []string, argv ...string) (*process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p := &process{cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.wait = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *process) err() error { <-p.done; return p.wait }

// stop sends SIGTERM and waits; a program that ignores it is killed and reported.
func (p *process) stop() error {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return p.wait
	case <-time.After(Patience):
		p.signal(syscall.SIGKILL)
		<-p.done
		return errors.New("did not stop when told")
	}
}
