package explain

import (
	"net/netip"
	"strings"
	"testing"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// childAsks is a bound child that asks the world, on a host without any other rule
// than its translation.
func childAsks() Snapshot {
	var g endpoint.Generation
	g[0] = 1
	a := endpoint.DefaultPools.At(0)
	ep := endpoint.Endpoint{
		Generation: g, Mode: endpoint.Multikernel, Attachment: endpoint.Attachment{IfName: "eth0"}, Address: a.Child, Gateway: a.Gateway,
		TransitHost: a.TransitHost, TransitPeer: a.TransitPeer, HostLink: g.HostLink(), PeerLink: "mkhost0",
		Binding: &endpoint.Binding{Shim: &endpoint.Process{PID: 7, Comm: "mk-shim"}}, Namespace: endpoint.Namespace{Path: "/run/netns/x"},
	}
	up := func(name string, addrs ...string) topo.Device {
		d := topo.Device{Name: name, Up: true, Carrier: true}
		for _, s := range addrs {
			d.Addresses = append(d.Addresses, netip.MustParsePrefix(s))
		}
		return d
	}
	world := addr("198.51.100.1")
	leave := topo.Way{Asked: true, Dev: "mkhost0", Via: a.TransitHost, Route: "default via 100.64.0.1 dev mkhost0 table 7300"}
	out := topo.Way{Asked: true, Dev: "ens4", Route: "default dev ens4"}
	back := topo.Way{Asked: true, Dev: ep.HostLink, Via: a.TransitPeer, Route: "172.30.0.0/30 via 100.64.0.2"}
	return Snapshot{
		Protocol: "tcp", Port: 443,
		From: Party{Addr: ep.Address, Endpoint: &ep, Space: &topo.Space{Links: map[string]topo.Device{
			"eth0": up("eth0", a.Gateway.String()+"/30"), "mkhost0": up("mkhost0", a.TransitPeer.String()+"/30"),
		}}},
		To: Party{Addr: world},
		Host: topo.Space{Links: map[string]topo.Device{
			ep.HostLink: up(ep.HostLink, a.TransitHost.String()+"/30"), "ens4": up("ens4", "198.51.100.10/24"),
		}},
		Ways: Ways{
			Leave: leave, Host: out, BackHost: back, BackArrive: topo.Way{Asked: true, Dev: "eth0", Route: "172.30.0.0/30 dev eth0"},
			ReversePath: back, BackReversePath: out,
		},
		Tables: ipt.ParseSave("nft", "*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -s 172.30.0.2/32 -o ens4 -j MASQUERADE\nCOMMIT\n"),
	}
}

// Each thing that goes wrong stops the packet at its station, by name.
func TestDecide(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(s *Snapshot)
		verdict api.Outcome
		because string
	}{
		{"all is well", func(*Snapshot) {}, api.Passes, "every station"},
		{"no shim", func(s *Snapshot) { s.From.Shim = "is not bound" }, api.Dropped, "pump of eth0 (namespace): is not bound"},
		{"no namespace", func(s *Snapshot) { s.From.Space = nil }, api.Broken, "netns /run/netns/x"},
		{"TUN down", func(s *Snapshot) { down(s.From.Space, "eth0") }, api.Broken, "link eth0 (namespace): is down"},
		{"peer missing", func(s *Snapshot) { delete(s.From.Space.Links, "mkhost0") }, api.Broken, "link mkhost0 (namespace): is missing"},
		{"host veth down", func(s *Snapshot) { down(&s.Host, s.From.Endpoint.HostLink) }, api.Broken, "(host): is down"},
		{"the namespace has no way", func(s *Snapshot) { s.Ways.Leave = topo.Way{Asked: true, Err: "no route"} }, api.Broken, "route to 198.51.100.1 (namespace): no route"},
		{"the wrong way", func(s *Snapshot) { s.Ways.Leave.Dev = "net1" }, api.Broken, "leads out by net1"},
		{"the router's address is gone", func(s *Snapshot) {
			d := s.Host.Links[s.From.Endpoint.HostLink]
			d.Addresses = nil
			s.Host.Links[s.From.Endpoint.HostLink] = d
		}, api.Broken, "nobody answers ARP"},
		{"the host does not forward", func(s *Snapshot) { s.Ways.Host = topo.Way{Asked: true, Err: "does not forward"} }, api.Broken, "does not forward"},
		{"the egress is down", func(s *Snapshot) { down(&s.Host, "ens4") }, api.Broken, "link ens4 (host): is down"},
		{"a table drops", func(s *Snapshot) {
			s.Tables = append(s.Tables, ipt.ParseSave("legacy", "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n")...)
		}, api.Dropped, "iptables filter FORWARD (host): FORWARD: the policy DROP"},
		{"another base chain drops", func(s *Snapshot) {
			s.Others = []ipt.BaseChain{{Family: "inet", Table: "fw", Name: "f", Hook: "forward", Drops: true}}
		}, api.Dropped, "nftables inet fw f"},
		{"another base chain may drop", func(s *Snapshot) {
			s.Others = []ipt.BaseChain{{Family: "inet", Table: "fw", Name: "f", Hook: "forward", Drops: true, Rules: 3}}
		}, api.Unknown, "whether one of its rules"},
		{"one of another hook does not matter", func(s *Snapshot) {
			s.Others = []ipt.BaseChain{{Family: "inet", Table: "fw", Name: "f", Hook: "output", Drops: true}}
		}, api.Passes, ""},
		{"a rule that nobody can judge", func(s *Snapshot) {
			s.Tables = append(s.Tables, ipt.ParseSave("nft", "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -m set --match-set x src -j DROP\nCOMMIT\n")...)
		}, api.Unknown, "--match-set cannot be judged"},
		{"a DNAT", func(s *Snapshot) {
			s.Tables = append(s.Tables, ipt.ParseSave("nft", "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1\nCOMMIT\n")...)
		}, api.Unknown, "ask for where that leads"},
		{"not translated", func(s *Snapshot) { s.Tables = nil }, api.Broken, "no rule translates 172.30.0.2"},
		{"policy denies", func(s *Snapshot) {
			s.Policy = []api.PolicyPoint{{Direction: "egress", Endpoint: s.From.Addr, Steps: []api.PolicyStep{
				{Layer: "NetworkACL", Policy: "a", Rule: "spec.egress[0]", Why: "allow"}, {Layer: "SecurityGroup", Policy: "web", Why: "no rule matches"},
			}}}
		}, api.Dropped, "policy egress of 172.30.0.2 (host): SecurityGroup web: no rule matches"},
		{"policy of somebody else", func(s *Snapshot) {
			s.Policy = []api.PolicyPoint{{Direction: "egress", Endpoint: s.To.Addr, Steps: []api.PolicyStep{{Layer: "NetworkACL", Why: "deny"}}}}
		}, api.Passes, ""},
		{"connection tracking is full", func(s *Snapshot) { s.Full = true }, api.Dropped, "the table is full"},
		{"the answer has no way", func(s *Snapshot) {
			s.Ways.BackHost = topo.Way{Asked: true, Dev: "other", Route: "172.30.0.0/16 dev other"}
		}, api.Broken, "its answer does not come back: route 172.30.0.0/16 dev other"},
		{"the answer ends in the namespace", func(s *Snapshot) { s.Ways.BackArrive.Dev = "net1" }, api.Broken, "leads to net1, not to the child"},
		{"answers are dropped", func(s *Snapshot) {
			s.Tables = append(s.Tables, ipt.ParseSave("nft", "*security\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i ens4 -m conntrack --ctstate ESTABLISHED -j DROP\nCOMMIT\n")...)
		}, api.Dropped, "does not come back: iptables security FORWARD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := childAsks()
			c.change(&s)
			x := Decide(s)
			if x.Verdict != c.verdict || !strings.Contains(x.Because, c.because) {
				t.Errorf("got %s: %s; want %s: %s", x.Verdict, x.Because, c.verdict, c.because)
			}
			for _, step := range append(x.Way, x.Back...) {
				if step.Object == "" || step.Why == "" || step.Where == "" || step.Outcome == "" {
					t.Errorf("a step says too little: %+v", step)
				}
			}
		})
	}
}

func down(s *topo.Space, name string) {
	d := s.Links[name]
	d.Up = false
	s.Links[name] = d
}
