package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// Network is the name of the CNI network of every call.
const Network = "mknet"

// Call is one execution of mk-cni.
type Call struct {
	Verb        string
	ContainerID string
	Netns       string // CNI_NETNS, may be empty
	IfName      string
	Config      map[string]any // added to the network configuration
	Args        string         // CNI_ARGS
	Env         []string
	Out         *os.File // standard output, which is then not returned
	// Started, if set, is called once the process runs.
	Started func(*os.Process)
}

// CNI executes mk-cni and returns its standard output. A CNI error object becomes
// the error, a *types.Error.
func (n *Node) CNI(t testing.TB, c Call) ([]byte, error) {
	t.Helper()
	conf := map[string]any{"cniVersion": "1.1.0", "name": Network, "type": "mk-cni", "socket": n.Socket, "cacheDir": n.Dir + "/cache", "log-file": n.Dir + "/mk-cni.log"}
	for k, v := range c.Config {
		conf[k] = v
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, n.Programs.CNI)
	cmd.Stdin = bytes.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if c.Out != nil {
		cmd.Stdout = c.Out
	}
	cmd.Env = append(append(os.Environ(), "CNI_COMMAND="+c.Verb, "CNI_CONTAINERID="+c.ContainerID, "CNI_NETNS="+c.Netns,
		"CNI_IFNAME="+c.IfName, "CNI_ARGS="+c.Args, "CNI_PATH="+n.Dir), c.Env...)
	err = cmd.Start()
	if err == nil {
		if c.Started != nil {
			c.Started(cmd.Process)
		}
		err = cmd.Wait()
	}
	if err != nil {
		var cniErr types.Error
		if cmd.ProcessState != nil && cmd.ProcessState.Exited() && json.Unmarshal(stdout.Bytes(), &cniErr) == nil && cniErr.Code != 0 {
			return stdout.Bytes(), &cniErr
		}
		return stdout.Bytes(), fmt.Errorf("mk-cni %s: %w: %s%s", c.Verb, err, stdout.String(), stderr.String())
	}
	return stdout.Bytes(), nil
}

// Add is a CNI ADD that must succeed; it returns the daemon's record.
func (n *Node) Add(t testing.TB, containerID string, ns *netlab.Namespace, ifName string) endpoint.Endpoint {
	t.Helper()
	return n.AddCall(t, Call{ContainerID: containerID, Netns: ns.Path(), IfName: ifName})
}

// AddCall is Add with everything that a call can carry.
func (n *Node) AddCall(t testing.TB, c Call) endpoint.Endpoint {
	t.Helper()
	c.Verb = "ADD"
	out, err := n.CNI(t, c)
	if err != nil {
		t.Fatalf("ADD %s/%s: %v", c.ContainerID, c.IfName, err)
	}
	var result types100.Result
	if err := json.Unmarshal(out, &result); err != nil {
		t.Fatalf("ADD result: %v\n%s", err, out)
	}
	for _, ep := range n.List(t) {
		if ep.ContainerID == c.ContainerID && ep.IfName == c.IfName {
			if len(result.IPs) != 1 || result.IPs[0].Address.IP.String() != ep.Address.String() {
				t.Fatalf("ADD reports %v, the record has %s", result.IPs, ep.Address)
			}
			return ep
		}
	}
	t.Fatalf("ADD succeeded, but no record has %s/%s", c.ContainerID, c.IfName)
	return endpoint.Endpoint{}
}

// AddResult is an ADD that must succeed, for its result as it was printed.
func (n *Node) AddResult(t testing.TB, c Call) json.RawMessage {
	t.Helper()
	c.Verb = "ADD"
	out, err := n.CNI(t, c)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Check is a CNI CHECK of the endpoint.
func (n *Node) Check(t testing.TB, ep endpoint.Endpoint) error {
	t.Helper()
	config := map[string]any{"prevResult": PrevResult(ep)}
	if ep.Mode == endpoint.Veth {
		config["mode"] = "veth"
	}
	_, err := n.CNI(t, Call{Verb: "CHECK", ContainerID: ep.ContainerID, Netns: ep.Namespace.Path, IfName: ep.IfName, Config: config})
	return err
}

// Del is a CNI DEL of the endpoint.
func (n *Node) Del(t testing.TB, ep endpoint.Endpoint) error {
	t.Helper()
	_, err := n.CNI(t, Call{Verb: "DEL", ContainerID: ep.ContainerID, Netns: ep.Namespace.Path, IfName: ep.IfName})
	return err
}

// PrevResult is what a runtime passes as prevResult after the ADD of ep.
func PrevResult(ep endpoint.Endpoint) map[string]any {
	if ep.Mode == endpoint.Veth {
		return podPrevResult(ep)
	}
	return map[string]any{
		"cniVersion": "1.1.0",
		"interfaces": []any{map[string]any{"name": ep.IfName, "sandbox": ep.Namespace.Path}},
		"ips":        []any{map[string]any{"address": ep.Address.String() + "/30", "gateway": ep.Gateway.String(), "interface": 0}},
	}
}

func podPrevResult(ep endpoint.Endpoint) map[string]any {
	host := endpoint.MAC(ep.Generation.HostMAC())
	gateway := ep.Gateway.String()
	routes := []any{map[string]any{"dst": gateway + "/32"}}
	for _, dst := range ep.PodRoutes() {
		routes = append(routes, map[string]any{"dst": dst.String(), "gw": gateway, "mtu": ep.MTUBytes})
	}
	return map[string]any{
		"cniVersion": "1.1.0",
		"interfaces": []any{
			map[string]any{"name": ep.HostLink, "mac": host.String()},
			map[string]any{"name": ep.IfName, "mac": ep.PodMAC().String(), "sandbox": ep.Namespace.Path},
		},
		"ips":    []any{map[string]any{"address": netip.PrefixFrom(ep.Address, ep.Subnet.Bits()).String(), "gateway": gateway, "interface": 1}},
		"routes": routes,
	}
}

// AddPod is a CNI ADD of an ordinary pod that must succeed.
func (n *Node) AddPod(t testing.TB, containerID string, ns *netlab.Namespace, config ...map[string]any) endpoint.Endpoint {
	t.Helper()
	all := map[string]any{"mode": "veth"}
	for _, c := range config {
		maps.Copy(all, c)
	}
	return n.AddCall(t, Call{ContainerID: containerID, Netns: ns.Path(), IfName: "eth0", Config: all})
}

// CodeOf is the code of a CNI error; 0 for any other.
func CodeOf(err error) uint {
	if e, ok := err.(*types.Error); ok { //nolint:errorlint // CNI returns it bare
		return e.Code
	}
	return 0
}

// Rules returns every iptables rule, of all tables, that names the text.
func Rules(t testing.TB, text string) []string {
	t.Helper()
	var found []string
	for line := range strings.Lines(netlab.Run(t, "iptables-save")) {
		if strings.Contains(line, text) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}
