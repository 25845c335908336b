package explain

import (
	"net/netip"
	"strings"
	"testing"

	"mknet/mknetd/internal/datapath"
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
		MTUBytes: 1400, Generation: g, Mode: endpoint.Multikernel, Attachment: endpoint.Attachment{IfName: "eth0"}, Address: a.Child, Gateway: a.Gateway,
		TransitHost: a.TransitHost, TransitPeer: a.TransitPeer, HostLink: g.HostLink(), PeerLink: "mkhost0",
		Binding: &endpoint.Binding{Shim: &endpoint.Process{PID: 7, Comm: "mk-shim"}}, Namespace: endpoint.Namespace{Path: "/run/netns/x"},
	}
	up := func(name string, addrs ...string) topo.Device {
		d := topo.Device{Name: name, Up: true, Carrier: true, MTUBytes: 1400}
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
		}, api.Unknown, "whether one of its rules (3) accepts"},
		{"another base chain may drop some", foreign(ipt.BaseChain{Type: "filter", MayStop: true, Rules: 2, Priority: -5}), api.Unknown, "nftables inet fw f (host): a base chain of somebody else, hook forward, priority -5: it may decide; whether one of its rules (2) drops"},
		{"another base chain has rules that drop nothing", foreign(ipt.BaseChain{Type: "filter", Rules: 2}), api.Passes, ""},
		{"another base chain drops all, at last", foreign(ipt.BaseChain{Type: "filter", Rules: 2, TakesRest: true, MayStop: true}), api.Unknown, "it may decide"},
		{"a chain of nat is not asked about a flow that exists", func(s *Snapshot) {
			flow(s)
			foreign(ipt.BaseChain{Type: "nat", MayStop: true, Rules: 1})(s)
		}, api.Passes, ""},
		{"a chain of nat may translate a new flow", foreign(ipt.BaseChain{Type: "nat", MayStop: true, Rules: 1}), api.Unknown, "it may decide"},
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
		{"policy denies", denied, api.Dropped, "policy egress of 172.30.0.2 (host): SecurityGroup web: no rule matches"},
		{"policy denies, and no program is attached", func(s *Snapshot) { denied(s); s.From.Path.From = datapath.Absent }, api.Passes, ""},
		{"policy denies, and the programs do not know the link", func(s *Snapshot) { denied(s); s.From.Path.Known = false }, api.Passes, ""},
		{"policy denies, and the kernel has nothing of it", func(s *Snapshot) { denied(s); s.From.Unjudged = true }, api.Passes, ""},
		{"policy denies, and the kernel has something else", func(s *Snapshot) { denied(s); s.From.Doubtful = true }, api.Unknown, "is not what was written"},
		{"nobody judged it, and its answer is denied", func(s *Snapshot) {
			denied(s)
			s.From.Path.From = datapath.Absent
			s.Answers = []api.PolicyPoint{{Direction: "ingress", Endpoint: s.From.Addr, Steps: []api.PolicyStep{{Layer: "SecurityGroup", Policy: "web", Why: "no rule matches"}}}}
		}, api.Dropped, "does not come back: policy ingress of 172.30.0.2"},
		{"its answer would be denied, but belongs to it", func(s *Snapshot) {
			denied(s)
			s.Policy[0].Allowed = true
			s.Answers = []api.PolicyPoint{{Direction: "ingress", Endpoint: s.From.Addr, Steps: []api.PolicyStep{{Layer: "SecurityGroup", Policy: "web", Why: "no rule matches"}}}}
		}, api.Passes, ""},
		{"a strange program", func(s *Snapshot) { denied(s); s.From.Path.From = datapath.Strange }, api.Unknown, "is not ours"},
		{"a strange program alone", func(s *Snapshot) { denied(s); s.Policy = nil; s.From.Path.From = datapath.Strange }, api.Unknown, "is not ours"},
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
		{"as long as fits", func(s *Snapshot) { s.SizeBytes = 1400 }, api.Passes, ""},
		{"too long for the child", func(s *Snapshot) { s.SizeBytes = 1401 }, api.Dropped, "mtu of link mkn0 (child): is 1400"},
		{"too long for the namespace", func(s *Snapshot) { s.SizeBytes = 1400; short(s.From.Space, "mkhost0", 1300) }, api.Dropped, "mtu of link mkhost0 (namespace): is 1300"},
		{"too long for the egress", func(s *Snapshot) { s.SizeBytes = 1400; short(&s.Host, "ens4", 1399) }, api.Dropped, "mtu of link ens4 (host): is 1399"},
		{"too long for the route", func(s *Snapshot) { s.SizeBytes, s.Ways.Host.MTUBytes = 1400, 1280 }, api.Dropped, "mtu of route default dev ens4 (host): is 1280"},
		{"lost between two ends", func(s *Snapshot) { s.SizeBytes = 1400; short(&s.Host, s.From.Endpoint.HostLink, 1395) }, api.Broken, "nobody is told"},
		{"between two ends there is room for a tag", func(s *Snapshot) { s.SizeBytes = 1400; short(&s.Host, s.From.Endpoint.HostLink, 1396) }, api.Passes, ""},
		{"an echo is cut on its way back", func(s *Snapshot) {
			s.Protocol, s.Port, s.SizeBytes = "icmp", 0, 1400
			short(s.From.Space, "eth0", 1300)
		}, api.Passes, ""},
		{"a rule of the namespace", inside("FORWARD", "-i eth0 -o mkhost0 -p tcp -m tcp --dport 443 -j DROP"), api.Dropped, "iptables filter FORWARD (namespace)"},
		{"a rule of the namespace for answers", inside("FORWARD", "-i mkhost0 -m conntrack --ctstate ESTABLISHED -j REJECT"), api.Dropped, "does not come back: iptables filter FORWARD (namespace)"},
		{"a rule of the namespace for its own", inside("OUTPUT", "-j DROP"), api.Passes, ""},
		{"another table of the namespace", func(s *Snapshot) {
			s.From.Chains = []ipt.BaseChain{{Family: "inet", Table: "fw", Name: "f", Hook: "forward", MayStop: true, Rules: 1}}
		}, api.Unknown, "nftables inet fw f (namespace)"},
		{"the flow exists, new ones are dropped", func(s *Snapshot) { flow(s); refuseNew(s) }, api.Passes, ""},
		{"the flow does not exist", func(s *Snapshot) { s.SourcePort = 40000; refuseNew(s) }, api.Dropped, "FORWARD 1: -m conntrack --ctstate NEW"},
		{"the flow was never answered", func(s *Snapshot) { flow(s); s.Flow.Answered = false; refuseNew(s) }, api.Dropped, "FORWARD 1"},
		{"the flow exists, the table is full", func(s *Snapshot) { flow(s); s.Full = true }, api.Passes, ""},
		{"the flow began without translation", func(s *Snapshot) { flow(s); s.Flow.ReplDestination = s.Flow.OrigSource }, api.Broken, "began without being translated"},
		{"the flow is translated although no rule is left", func(s *Snapshot) { flow(s); s.Tables = nil }, api.Passes, ""},
		{"the flow's destination is translated", func(s *Snapshot) {
			flow(s)
			s.Flow.ReplSource = netip.MustParseAddrPort("10.0.0.9:443")
		}, api.Unknown, "was translated from 198.51.100.1:443 to 10.0.0.9:443"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := childAsks()
			c.change(&s)
			x := Decide(s)
			if x.Verdict != c.verdict || !strings.Contains(x.Because, c.because) {
				t.Errorf("got %s: %s; want %s: %s", x.Verdict, x.Because, c.verdict, c.because)
			}
			if c.verdict == api.Unknown && len(x.NotJudged) != 1 || c.verdict == api.Passes && len(x.NotJudged) > 0 {
				t.Errorf("not judged: %+v", x.NotJudged) // both ways have the same station
			}
			for _, step := range append(x.Way, x.Back...) {
				if step.Object == "" || step.Why == "" || step.Where == "" || step.Outcome == "" {
					t.Errorf("a step says too little: %+v", step)
				}
			}
		})
	}
}

// denied has policy forbid the packet to a child with programs.
func denied(s *Snapshot) {
	s.From.Path = &datapath.View{From: datapath.Ours, To: datapath.Ours, Known: true, Entry: &datapath.Entry{OwnLink: true, StackOnly: true}}
	s.Policy = []api.PolicyPoint{{Direction: "egress", Endpoint: s.From.Addr, Steps: []api.PolicyStep{
		{Layer: "NetworkACL", Policy: "a", Rule: "spec.egress[0]", Why: "allow"}, {Layer: "SecurityGroup", Policy: "web", Why: "no rule matches"},
	}}}
}

// foreign has a base chain of somebody else stand where packets are forwarded.
func foreign(c ipt.BaseChain) func(s *Snapshot) {
	c.Family, c.Table, c.Name, c.Hook = "inet", "fw", "f", "forward"
	return func(s *Snapshot) { s.Others = append(s.Others, c) }
}

// inside adds a rule to table filter of the child's namespace.
func inside(chain, rule string) func(s *Snapshot) {
	return func(s *Snapshot) {
		s.From.Rules = ipt.ParseSave("nft", "*filter\n:"+chain+" ACCEPT [0:0]\n-A "+chain+" "+rule+"\nCOMMIT\n")
	}
}

// flow has the host know the flow, translated and answered.
func flow(s *Snapshot) {
	s.SourcePort = 40000
	from, to := netip.AddrPortFrom(s.From.Addr, 40000), netip.AddrPortFrom(s.To.Addr, 443)
	s.Flow = &Flow{Answered: true, OrigSource: from, OrigDestination: to, ReplSource: to, ReplDestination: netip.MustParseAddrPort("198.51.100.10:40000")}
}

func refuseNew(s *Snapshot) {
	s.Tables = append(s.Tables, ipt.ParseSave("nft", "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -m conntrack --ctstate NEW -j DROP\nCOMMIT\n")...)
}

func short(s *topo.Space, name string, mtu int) {
	d := s.Links[name]
	d.MTUBytes = mtu
	s.Links[name] = d
}

func down(s *topo.Space, name string) {
	d := s.Links[name]
	d.Up = false
	s.Links[name] = d
}

// podsTalk is a pod that asks another one of its node.
func podsTalk() Snapshot {
	pod := func(i byte) Party {
		g := endpoint.Generation{i}
		address := netip.AddrFrom4([4]byte{10, 0, 0, i})
		ep := &endpoint.Endpoint{Generation: g, Mode: endpoint.Veth, Attachment: endpoint.Attachment{IfName: "eth0"}, Address: address, Gateway: addr("10.0.0.1"), HostLink: "lxc" + string('0'+i), MTUBytes: 1400}
		return Party{
			Addr: address, Endpoint: ep,
			Space: &topo.Space{Links: map[string]topo.Device{"eth0": {Name: "eth0", Up: true, MTUBytes: 1400, MAC: ep.PodMAC()}}},
			Path:  &datapath.View{From: datapath.Ours, To: datapath.Ours, Known: true, Entry: &datapath.Entry{OwnLink: true, PodMAC: ep.PodMAC(), HostMAC: g.HostMAC(), MTUBytes: 1400}},
		}
	}
	a, b := pod(2), pod(3)
	host := topo.Space{Links: map[string]topo.Device{}}
	for _, p := range []Party{a, b} {
		host.Links[p.Endpoint.HostLink] = topo.Device{Name: p.Endpoint.HostLink, Up: true, MTUBytes: 1400, MAC: p.Endpoint.Generation.HostMAC(), Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}}
	}
	leave := topo.Way{Asked: true, Dev: "eth0", Via: addr("10.0.0.1"), Route: "default via 10.0.0.1 dev eth0"}
	here := topo.Way{Asked: true, Local: true, Dev: "lo", Route: "local"}
	to := func(p Party) topo.Way {
		return topo.Way{Asked: true, Dev: p.Endpoint.HostLink, Route: p.Addr.String() + " dev " + p.Endpoint.HostLink}
	}
	return Snapshot{
		Protocol: "tcp", Port: 80, From: a, To: b, Host: host,
		Ways: Ways{Leave: leave, BackLeave: leave, Arrive: here, BackArrive: here, Host: to(b), BackHost: to(a), ReversePath: to(a), BackReversePath: to(b)},
		// Whoever crosses the host's stack meets this.
		Tables: ipt.ParseSave("nft", "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i lxc2 -j DROP\nCOMMIT\n"),
	}
}

// Which packets between pods pass by the host's stack.
func TestRedirects(t *testing.T) {
	for _, c := range []struct {
		name     string
		change   func(s *Snapshot)
		redirect bool
	}{
		{"a new flow", func(*Snapshot) {}, true},
		{"not without the program", func(s *Snapshot) { s.From.Path.From = datapath.Absent }, false},
		{"whatever is at the other end", func(s *Snapshot) { s.To.Path.To = datapath.Absent }, true},
		{"not where one is shaped", func(s *Snapshot) { s.To.Path.Entry.StackOnly = true }, false},
		{"not to whom nobody knows", func(s *Snapshot) { s.To.Path.Entry = nil }, false},
		{"not to the link of another", func(s *Snapshot) { s.To.Path.Entry.OwnLink = false }, false},
		{"as long as fits", func(s *Snapshot) { s.SizeBytes = 1400 }, true},
		{"what is too long for the other goes by the router", func(s *Snapshot) { s.SizeBytes, s.To.Path.Entry.MTUBytes = 1400, 1300 }, false},
		{"a flow that began there", func(s *Snapshot) { s.SourcePort, s.Path = 40000, datapath.ByRedirect }, true},
		{"one that the host delivered", func(s *Snapshot) { s.SourcePort, s.Path = 40000, datapath.ByStack }, false},
		{"a connection that nobody remembers", func(s *Snapshot) { flow(s) }, false},
		{"of UDP nobody needs to", func(s *Snapshot) { flow(s); s.Protocol = "udp" }, true},
		{"a frame to another station", func(s *Snapshot) { s.From.Path.Entry.HostMAC = endpoint.MAC{0x12} }, false},
	} {
		s := podsTalk()
		c.change(&s)
		x := Decide(s)
		if (x.Verdict == api.Passes) != c.redirect {
			t.Errorf("%s: %s: %s", c.name, x.Verdict, x.Because)
		}
	}
	s := podsTalk()
	s.To.Path.Entry.PodMAC = endpoint.MAC{0x12}
	if x := Decide(s); x.Verdict != api.Broken || !strings.Contains(x.Because, "what is redirected is sent to") {
		t.Errorf("with another hardware address: %s: %s", x.Verdict, x.Because)
	}
}
