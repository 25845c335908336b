package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// storyBudget bounds all calls of one story; on an idle machine they take some
// seconds.
const storyBudget = 5 * node.Patience

// life is what a runtime does with mknetd: every operation of its API.
var life = story{name: "mknetd-life", play: func(t *testing.T, n *node.Node, v *victim, o *outcome) {
	c := newCaller(t, n)
	err := n.TryStart(t, v.env("serve")...)
	if err == nil {
		err = c.run(t)
	}
	switch {
	case v.at == nil && err != nil:
		t.Fatalf("the story without a crash: %v", err)
	case v.at == nil:
		n.Kill(t)
	case err == nil: // a later visit that did not come
		n.Kill(t)
	default:
		if answer := new(api.Error); errors.As(err, &answer) {
			t.Fatalf("mknetd lives and refuses a call: %v", err)
		}
		n.WaitDead(t)
		o.Reached = true
	}
	n.Start(t)
	c.checkPolicies(t, o)
	judge(t, n, o, c.acknowledged(), func() { c.deleteAll(t, o) })
}}

// caller makes the calls. It stops at the first error, which is the daemon dying,
// and remembers what was acknowledged.
type caller struct {
	n     *node.Node
	pod   *netlab.Namespace
	alive map[endpoint.Generation]bool // acknowledged, and no removal was asked for
	maybe map[endpoint.Generation]bool // a removal was asked for and not acknowledged

	// The port of the policies that were acknowledged last, and of those asked for
	// since; 0 none, -1 that they go.
	applied, pending int
}

func newCaller(t *testing.T, n *node.Node) *caller {
	t.Helper()
	return &caller{n: n, pod: netlab.New(t), alive: map[endpoint.Generation]bool{}, maybe: map[endpoint.Generation]bool{}}
}

func (s *caller) acknowledged() []endpoint.Generation {
	var list []endpoint.Generation
	for gen := range s.alive {
		if !s.maybe[gen] {
			list = append(list, gen)
		}
	}
	return list
}

// deleteAll deletes every endpoint that there is.
func (s *caller) deleteAll(t *testing.T, o *outcome) {
	t.Helper()
	c := s.n.Client(t)
	if _, err := c.DeletePolicy(t.Context(), api.PolicyDeleteRequest{Objects: policyNames}); err != nil {
		o.fault(clean, "delete the policies: %v", err)
	}
	for _, ep := range s.n.List(t) {
		if ep.Binding != nil {
			if err := c.Unbind(t.Context(), ep.Generation, api.UnbindRequest{Sandbox: ep.Binding.Sandbox}); err != nil {
				o.fault(clean, "unbind %s: %v", ep.Generation, err)
			}
		}
		if _, err := c.DeleteEndpoint(t.Context(), ep.Generation); err != nil {
			o.fault(clean, "delete %s: %v", ep.Generation, err)
		}
	}
}

func (s *caller) run(t *testing.T) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), storyBudget)
	defer cancel()
	c := s.n.Client(t)
	sandbox := endpoint.Sandbox{ID: "s1", Generation: "g1"}

	ep, err := s.add(ctx, c, "eth0")
	if err != nil {
		return err
	}
	second, err := s.add(ctx, c, "net1")
	if err != nil {
		return err
	}
	bound, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: sandbox})
	if err != nil {
		return err
	}
	_, queues, err := c.Attach(ctx, ep.Generation, api.AttachRequest{Sandbox: sandbox, Nonce: bound.Nonce, Queues: 1})
	for _, f := range queues {
		f.Close()
	}
	if err != nil {
		return err
	}
	// This process is the shim, and alive: the DEL is refused and recorded.
	s.maybe[ep.Generation] = true
	if err := s.remove(ctx, c, ep.Generation); api.CodeOf(err) != api.FailedPrecondition {
		return fmt.Errorf("DEL of a bound endpoint: %w", err)
	}
	if err := c.Unbind(ctx, ep.Generation, api.UnbindRequest{Sandbox: sandbox}); err != nil {
		return err
	}
	delete(s.alive, ep.Generation)
	delete(s.maybe, ep.Generation)

	// Now mk-shim, which is killed by the UNBIND.
	if err := s.attachShim(ctx, t, c, second.Generation, sandbox); err != nil {
		return err
	}
	if err := c.Unbind(ctx, second.Generation, api.UnbindRequest{Sandbox: sandbox}); err != nil {
		return err
	}
	if err := s.policies(ctx, c); err != nil {
		return err
	}
	if err := s.remove(ctx, c, second.Generation); err != nil {
		return err
	}
	if err := s.ordinaryPod(ctx, c); err != nil {
		return err
	}
	return s.provisionAndCollect(ctx, c, sandbox)
}

// The policies of a story: the later ones replace a rule of the earlier ones.
const (
	policyDocs = `{apiVersion: mknet/v1, kind: SecurityGroup, metadata: {name: web}, spec: {ingress: [{protocol: tcp, ports: [{port: %d}]}]}}
---
{apiVersion: mknet/v1, kind: NetworkACL, metadata: {name: edge}, spec: {egress: [{priority: 10, action: allow}]}}
---
{apiVersion: mknet/v1, kind: Attachment, metadata: {name: all}, spec: {networkACLRef: {name: edge}, pools: [children], securityGroupRefs: [{name: web}], endpoints: [{network: %s}]}}
`
	earlierPort, laterPort = 80, 8443
)

var policyNames = []api.PolicyName{{Kind: "Attachment", Name: "all"}, {Kind: "NetworkACL", Name: "edge"}, {Kind: "SecurityGroup", Name: "web"}}

// policies applies documents that concern an endpoint which stands, changes them and
// takes them away.
func (s *caller) policies(ctx context.Context, c *client.Client) error {
	for _, port := range []int{earlierPort, laterPort} {
		s.pending = port
		if _, err := c.ApplyPolicy(ctx, api.PolicyApplyRequest{Manifest: fmt.Sprintf(policyDocs, port, node.Network)}); err != nil {
			return err
		}
		s.applied, s.pending = port, 0
	}
	s.pending = -1
	if _, err := c.DeletePolicy(ctx, api.PolicyDeleteRequest{Objects: policyNames}); err != nil {
		return err
	}
	s.applied, s.pending = 0, 0
	return nil
}

// checkPolicies holds the documents of a restarted mknetd to what was acknowledged.
func (s *caller) checkPolicies(t *testing.T, o *outcome) {
	t.Helper()
	docs, err := s.n.Client(t).Policies(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	have := 0
	for _, d := range docs {
		for _, port := range []int{earlierPort, laterPort} {
			if strings.Contains(d.Manifest, fmt.Sprintf(`"port":%d`, port)) {
				have = port
			}
		}
	}
	if len(docs) != 0 && len(docs) != len(policyNames) || (len(docs) == 0) != (have == 0) {
		o.fault(acknowledged, "half a set of policies: %v", docs)
	}
	if have != s.applied && have != max(s.pending, 0) {
		o.fault(acknowledged, "policies of port %d are in force, acknowledged was %d, asked for %d", have, s.applied, s.pending)
	}
}

// ordinaryPod gives a pod of this kernel the address of a lease, and gives another
// lease back.
func (s *caller) ordinaryPod(ctx context.Context, c *client.Client) error {
	pod := endpoint.Pod{Namespace: "default", Name: "web"}
	lease, err := c.Allocate(ctx, api.LeaseRequest{Pod: pod})
	if err != nil {
		return err
	}
	ep, err := s.create(ctx, c, s.pod, api.CreateRequest{
		Attachment: endpoint.Attachment{Network: node.Network, ContainerID: "w1", IfName: "eth0"}, Mode: endpoint.Veth, Pod: pod, Lease: lease.ID,
	})
	if err != nil {
		return err
	}
	if err := s.remove(ctx, c, ep.Generation); err != nil {
		return err
	}
	if lease, err = c.Allocate(ctx, api.LeaseRequest{Pod: pod}); err != nil {
		return err
	}
	return c.ReleaseLease(ctx, lease.ID)
}

// provisionAndCollect is PROVISION, RELEASE and GC.
func (s *caller) provisionAndCollect(ctx context.Context, c *client.Client, sandbox endpoint.Sandbox) error {
	req := api.ProvisionRequest{CreateRequest: api.CreateRequest{Attachment: endpoint.Attachment{Network: node.Network, ContainerID: "p1", IfName: "eth0"}}, Sandbox: sandbox}
	made, err := c.Provision(ctx, req)
	if err != nil {
		return err
	}
	gen := made.Endpoint.Generation
	s.alive[gen] = true
	s.maybe[gen] = true
	if _, err := c.Release(ctx, api.ReleaseRequest{Generation: gen, Sandbox: sandbox}); err != nil {
		return err
	}
	delete(s.alive, gen)
	delete(s.maybe, gen)

	third, err := s.add(ctx, c, "eth0")
	if err != nil {
		return err
	}
	s.maybe[third.Generation] = true
	if _, err := c.GC(ctx, api.GCRequest{Network: node.Network, Valid: &[]api.GCAttachment{}}); err != nil {
		return err
	}
	delete(s.alive, third.Generation)
	delete(s.maybe, third.Generation)
	return nil
}

// attachShim starts mk-shim and waits until it has the descriptors. Its child
// never answers.
func (s *caller) attachShim(ctx context.Context, t *testing.T, c *client.Client, gen endpoint.Generation, sandbox endpoint.Sandbox) error {
	t.Helper()
	shim := startShim(t, s.n, gen, sandbox)
	for {
		ep, err := c.GetEndpoint(ctx, gen)
		if err != nil {
			shim.kill() // after a crash the binding stands without its shim
			return err
		}
		if ep.Binding != nil && ep.Binding.Shim != nil {
			return nil
		}
		select {
		case <-shim.done:
			t.Fatalf("mk-shim did not attach:\n%s", &shim.said)
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// idleShim is a mk-shim for a child that is not there.
type idleShim struct {
	cmd  *exec.Cmd
	said bytes.Buffer // complete once done is closed
	done chan struct{}
}

func (s *idleShim) kill() {
	_ = s.cmd.Process.Kill() // it may have ended
	<-s.done
}

// startShim starts a shim that ends with the test at the latest.
func startShim(t *testing.T, n *node.Node, gen endpoint.Generation, sandbox endpoint.Sandbox) *idleShim {
	t.Helper()
	dir := shortDir(t, n)
	netlab.Run(t, n.Shim, "token", dir+"/token")
	s := &idleShim{done: make(chan struct{})}
	s.cmd = exec.Command(n.Shim, "run", "--socket", n.Socket, "--endpoint", gen.String(), "--sandbox-id", sandbox.ID, "--sandbox-generation", sandbox.Generation,
		"--agent", "unix://"+dir+"/nobody.sock", "--token", dir+"/token", "--connect-timeout", "0s", "--stats-dir", dir+"/stats")
	s.cmd.Stderr = &s.said
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { // ends with the shim
		_ = s.cmd.Wait() // mostly killed
		close(s.done)
	}()
	t.Cleanup(s.kill)
	return s
}

// shortDir is a folder of the node whose path leaves room for a socket's name; a
// test's own has the name of the test in it (sun_path takes 107 bytes, unix(7)).
func shortDir(t *testing.T, n *node.Node) string {
	t.Helper()
	dir, err := os.MkdirTemp(n.Dir, "d")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func (s *caller) add(ctx context.Context, c *client.Client, ifName string) (endpoint.Endpoint, error) {
	return s.addTo(ctx, c, s.pod, "c1", ifName)
}

func (s *caller) addTo(ctx context.Context, c *client.Client, pod *netlab.Namespace, container, ifName string) (endpoint.Endpoint, error) {
	return s.create(ctx, c, pod, api.CreateRequest{Attachment: endpoint.Attachment{Network: node.Network, ContainerID: container, IfName: ifName}})
}

func (s *caller) create(ctx context.Context, c *client.Client, pod *netlab.Namespace, req api.CreateRequest) (endpoint.Endpoint, error) {
	ns, err := os.Open(pod.Path())
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	defer ns.Close()
	req.NetnsPath = pod.Path()
	ep, err := c.CreateEndpoint(ctx, req, ns)
	if err == nil {
		s.alive[ep.Generation] = true
	}
	return ep, err
}

func (s *caller) remove(ctx context.Context, c *client.Client, gen endpoint.Generation) error {
	s.maybe[gen] = true
	_, err := c.DeleteEndpoint(ctx, gen)
	if err == nil {
		delete(s.alive, gen)
		delete(s.maybe, gen)
	}
	return err
}
