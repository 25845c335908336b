package explain_test

import (
	"fmt"
	"strings"
	"testing"

	"mknet/mknetd/internal/topo"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }

// bed is a node without an audit: what is broken stays broken until a restart.
type bed struct {
	*node.Node
	rounds int  // of questions so far
	oneWay bool // who sends first on a connection decides what becomes of it
}

func newBed(t *testing.T) *bed {
	t.Helper()
	n := node.New(t, "auditInterval: 0s", "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	// Nobody out there knows the pools, as in the world.
	n.Internet.Run(t, "ip", "route", "del", "172.30.0.0/16")
	return &bed{Node: n}
}

// victim is an endpoint with one object to be broken.
type victim struct {
	endpoint.Endpoint
	ns    *netlab.Namespace
	child *node.Child // nil: a pod, or a child that nobody booted
	hurt  breakage
}

// breakage changes one kernel object of an endpoint by hand.
type breakage struct {
	name   string // the same for every endpoint: "route 5 (namespace)"
	kind   string // as faults name it
	object func(v victim) string
	do     func(t *testing.T, v victim)
	config map[string]any // of the endpoint that is to be broken
	// shared says that all endpoints suffer.
	shared bool
	// unjudged says that nobody can tell what a packet meets then.
	unjudged bool
}

// run runs a command where a step is.
func (v victim) run(t *testing.T, where string, args ...string) {
	t.Helper()
	if where == endpoint.InHost {
		netlab.Run(t, args[0], args[1:]...)
		return
	}
	v.ns.Run(t, args[0], args[1:]...)
}

// hurtStep is what an operator's hand does to one object of topo's table.
func hurtStep(t *testing.T, v victim, s topo.Step) {
	t.Helper()
	ip := func(args ...string) { v.run(t, s.Where, append([]string{"ip"}, args...)...) }
	switch s.Kind {
	case topo.KindVeth, topo.KindTun:
		ip("link", "del", s.Link)
	case topo.KindPeer, topo.KindPod:
		ip("link", "set", s.Link, "down")
		ip("link", "set", s.Link, "name", "taken")
	case topo.KindMTU:
		ip("link", "set", s.Link, "mtu", "1300")
	case topo.KindSysctl, topo.KindForward:
		value := "0"
		if s.Value == "0" {
			value = "1"
		}
		if strings.HasSuffix(s.Path, "rp_filter") {
			value = "1"
		}
		v.run(t, s.Where, "sysctl", "-qw", s.Path+"="+value)
	case topo.KindRPFilter:
		v.run(t, s.Where, "sysctl", "-qw", s.Path+"=1")
	case topo.KindAddress:
		ip("addr", "del", s.Prefix.String(), "dev", s.Link)
	case topo.KindRule:
		ip("rule", "del", "iif", s.Link)
	case topo.KindRoute:
		ip(append([]string{"route", "del"}, routeArgs(s)...)...)
	case topo.KindUp:
		ip("link", "set", s.Link, "down")
	case topo.KindMAC:
		ip("link", "set", s.Link, "address", "02:00:00:00:00:99")
	case topo.KindGroup:
		ip("link", "set", s.Link, "group", "0")
	case topo.KindQdisc:
		v.run(t, s.Where, "tc", "qdisc", "del", "dev", s.Link, "root")
	case topo.KindNeigh:
		ip("neigh", "replace", s.Via.String(), "lladdr", "02:00:00:00:00:98", "dev", s.Link, "nud", "permanent")
	default:
		t.Fatalf("nobody knows how to break a %s", s.Kind)
	}
}

func routeArgs(s topo.Step) []string {
	var args []string
	if s.Blackhole {
		args = append(args, "unreachable")
	}
	to := "default"
	if s.Prefix.Bits() != 0 {
		to = s.Prefix.String()
	}
	args = append(args, to)
	if s.Link != "" {
		args = append(args, "dev", s.Link)
	}
	if s.Table != 0 {
		args = append(args, "table", fmt.Sprint(s.Table))
	}
	return args
}

// breakages are one for each object that the endpoint's plan has for itself, in its
// order, and those of its rules.
func breakages(t *testing.T, ep endpoint.Endpoint) []breakage {
	t.Helper()
	all := planned(ep, "%02d ", nil, func(s topo.Step) bool { return !s.Shared })
	if ep.Mode == endpoint.Veth {
		return all
	}
	for _, table := range []string{"raw", "security", "nat", "filter"} {
		all = append(all, breakage{
			name: "iptables " + table, kind: "iptables", object: func(v victim) string { return table + " " + v.Chain },
			do: func(t *testing.T, v victim) {
				t.Helper()
				netlab.Run(t, "iptables", "-t", table, "-F", v.Chain)
			},
		})
	}
	return all
}

// planned are breakages of those steps of a plan that are asked for. number is the
// format of a step's number in front of its name.
func planned(ep endpoint.Endpoint, number string, config map[string]any, which func(topo.Step) bool) []breakage {
	steps := func(ep endpoint.Endpoint) []topo.Step {
		plan := topo.PlanFor(ep)
		return append(plan.Devices, plan.Live...)
	}
	var all []breakage
	for i, s := range steps(ep) {
		if !which(s) {
			continue
		}
		name := fmt.Sprintf("%s (%s)", s.Kind, s.Where)
		if number != "" {
			name = fmt.Sprintf(number, i+1) + name
		}
		all = append(all, breakage{
			name: name, kind: s.Kind, config: config, shared: s.Shared,
			object: func(v victim) string { return steps(v.Endpoint)[i].Name() },
			do: func(t *testing.T, v victim) {
				t.Helper()
				hurtStep(t, v, steps(v.Endpoint)[i]) // of this very endpoint
			},
		})
	}
	return all
}

// shapers are the queueing disciplines of an endpoint with a bandwidth.
func shapers(ep endpoint.Endpoint) []breakage {
	ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 1, EgressRate: 1}
	rate := map[string]any{"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000}
	config := map[string]any{"runtimeConfig": map[string]any{"bandwidth": rate}}
	return planned(ep, "", config, func(s topo.Step) bool { return s.Kind == topo.KindQdisc })
}

// sharedByAll are objects that every endpoint relies on.
func sharedByAll(ep endpoint.Endpoint) []breakage {
	return planned(ep, "%02d ", nil, func(s topo.Step) bool { return s.Shared })
}
