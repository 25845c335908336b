package operate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// metadata is the cloud's address, which a child's chain refuses.
const metadata = "169.254.169.254"

// collect runs a trace of a child and returns its lines.
func collect(t *testing.T, n *node.Node, req api.TraceRequest, send func()) (all []api.TraceLine) {
	t.Helper()
	err := n.Client(t).Trace(within(t), req, func(l api.TraceLine) error {
		if all = append(all, l); l.Begin != nil {
			send()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// told is a trace in short: of programs "there from_child 100", of iptables
// "there accept filter MK-0123456789ab 6: -o up0 ... -j ACCEPT", of others "pump: ...".
type told struct {
	lines []string
	flows []string // the addresses of packets
	end   api.TraceEnd
}

func tell(lines []api.TraceLine) (r told) {
	for _, l := range lines {
		switch {
		case l.Event != nil:
			ev := l.Event
			way := "there"
			if ev.Reply {
				way = "back"
			}
			flow := fmt.Sprintf("%s>%s:%d", ev.Source, ev.Destination, ev.DestinationPort)
			if !ev.Reply && !slices.Contains(r.flows, flow) {
				r.flows = append(r.flows, flow)
			}
			if ev.Hook == "iptables" {
				r.lines = append(r.lines, way+" "+ev.Verdict+" "+ev.Place())
			} else {
				r.lines = append(r.lines, fmt.Sprintf("%s %s %d", way, ev.Hook, ev.Code))
			}
		case l.Note != nil:
			r.lines = append(r.lines, l.Note.About+": "+l.Note.Text)
		case l.End != nil:
			r.end = *l.End
		}
	}
	return r
}

// has looks for a line that begins with one text and ends with another.
func (r told) has(begin, end string) bool {
	return slices.ContainsFunc(r.lines, func(l string) bool { return strings.HasPrefix(l, begin) && strings.HasSuffix(l, end) })
}

func (r told) String() string {
	return fmt.Sprintf("%s\n%s\n%s: %s", strings.Join(r.flows, " "), strings.Join(r.lines, "\n"), r.end.Verdict, r.end.Because)
}

// programmed waits until the link of a child has programs.
func programmed(t *testing.T, n *node.Node, ep endpoint.Endpoint) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
		defer cancel()
		h, err := n.Client(t).Inventory(ctx)
		if err != nil {
			return err
		}
		for _, it := range h.Items {
			if it.Kind == "bpf-program" && it.Generation == ep.Generation && it.Status == api.Recorded {
				return nil
			}
		}
		return errors.New("the child's link has no program")
	})
}

// datagram sends one out of a namespace.
func datagram(t *testing.T, from *netlab.Namespace, to string, port int) {
	t.Helper()
	from.Run(t, "bash", "-c", fmt.Sprintf("echo x > /dev/udp/%s/%d", to, port))
}

// What a child sends is told at its programs and by every rule of iptables that it
// meets: of this flow and its answers alone, while the child has others.
func TestTraceOfAChild(t *testing.T) {
	n := node.New(t, "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	pod := n.AddPod(t, "p1", netlab.New(t)) // with it, children get programs
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	booted := n.Boot(t, ep, "1")
	child, chain := ep.Address.String(), ep.Generation.Chain()
	programmed(t, n, ep)

	// Pods may not reach children unless they are let: by iptables, behind the programs.
	got := tell(collect(t, n, api.TraceRequest{From: pod.Address.String(), To: child, Protocol: "udp", Port: 9, Probe: true, TimeoutSeconds: 5}, func() {}))
	if got.end.Verdict != api.Dropped || !got.has("there from_container 502", "") || !got.has("there drop filter "+chain+"-OUT ", "-j DROP") ||
		!strings.HasPrefix(got.end.Because, "iptables: filter "+chain+"-OUT ") {
		t.Errorf("pod to child: %s", got)
	}
	got = tell(collect(t, n, api.TraceRequest{From: "c1", To: netlab.InternetAddr, Protocol: "icmp", TimeoutSeconds: 4}, func() {
		booted.Run(t, "ping", "-n", "-c1", "-W20", netlab.InternetAddr)
		datagram(t, booted.Namespace, netlab.InternetAddr, 9)
		booted.Run(t, "ping", "-n", "-c1", "-W20", ep.Gateway.String())
	}))
	if got.end.Verdict != api.Passes || !got.has("there from_child 502", "") || !got.has("there accept filter "+chain+" ", "-j ACCEPT") ||
		!got.has("there return security "+chain+" ", "-j RETURN") || !got.has("there accept nat "+chain+" 1: ", "-j MASQUERADE") ||
		!got.has("back accept filter "+chain+"-OUT 1: -i up0 ", "-j ACCEPT") || !slices.Equal(got.flows, []string{child + ">" + netlab.InternetAddr + ":0"}) {
		t.Errorf("child to the world: %s", got)
	}
	if slices.ContainsFunc(got.lines, func(l string) bool { return strings.HasPrefix(l, "iptables:") || strings.Contains(l, "of all flows") }) {
		t.Errorf("counters are told: %s", got)
	}
	got = tell(collect(t, n, api.TraceRequest{From: "c1", To: metadata, Protocol: "udp", Port: 80, TimeoutSeconds: 4}, func() {
		datagram(t, booted.Namespace, metadata, 80)
		datagram(t, booted.Namespace, metadata, 81)
	}))
	if got.end.Verdict != api.Dropped || !got.has("there drop filter "+chain+" ", "-j REJECT --reject-with icmp-port-unreachable") ||
		!strings.Contains(got.end.Because, "--ctorigdst "+metadata) || !slices.Equal(got.flows, []string{child + ">" + metadata + ":80"}) {
		t.Errorf("child to the metadata address: %s", got)
	}
}

// Where children have no programs iptables tells alone. The trace's table is nobody's
// fault, nothing is repaired because of it, and it does not outlive its daemon.
func TestTraceByIPTablesAlone(t *testing.T) {
	n := node.New(t)
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	booted := n.Boot(t, ep, "1")
	chain := ep.Generation.Chain()
	got := tell(collect(t, n, api.TraceRequest{From: "c1", To: netlab.InternetAddr, Protocol: "udp", Port: 9, TimeoutSeconds: 3}, func() {
		datagram(t, booted.Namespace, netlab.InternetAddr, 9)
	}))
	if got.end.Verdict != api.Passes || !got.has("there accept filter "+chain+" ", "-j ACCEPT") || !strings.HasPrefix(got.end.Because, "iptables: ") {
		t.Errorf("child to the world: %s", got)
	}

	explain := []string{"explain", "--config", n.Config, "--from", ep.Address.String(), "--to", netlab.InternetAddr + ":9", "--proto", "udp"}
	before, repaired := netlab.Run(t, n.Daemon, explain...), objectEvents(t, n)
	begin(t, n, "--from", "c1", "--to", netlab.InternetAddr, "--proto", "udp", "--port", "9")
	if got := tables(t); len(got) != 1 {
		t.Errorf("a trace has the tables %q", got)
	}
	if after := netlab.Run(t, n.Daemon, explain...); after != before {
		t.Errorf("while a trace runs it is explained as\n%s\nbefore it was\n%s", after, before)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK while a trace runs: %v", err)
	}
	n.CheckInventory(t)
	if out, _ := netlab.Try(n.Daemon, "doctor", "--config", n.Config); strings.Contains(out, "mknet-trace") || !strings.Contains(out, " checks") {
		t.Errorf("doctor says\n%s", out)
	}
	if got := objectEvents(t, n); got != repaired {
		t.Errorf("objects changed while a trace ran:\n%s\nbefore:\n%s", got, repaired)
	}
	n.Kill(t)
	if got := tables(t); got != nil {
		t.Errorf("a daemon that was killed has left %q", got)
	}
	n.Start(t)
}

// objectEvents are the changes of kernel objects so far.
func objectEvents(t *testing.T, n *node.Node) string {
	t.Helper()
	return netlab.Run(t, n.Daemon, "events", "--config", n.Config)
}

// The flavour legacy has no trace of packets: its counters are told, as such.
func TestTraceOfAChildByCounters(t *testing.T) {
	n := node.New(t, "firewall: legacy", "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	n.AddPod(t, "p1", netlab.New(t))
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	booted := n.Boot(t, ep, "1")
	programmed(t, n, ep)
	got := tell(collect(t, n, api.TraceRequest{From: "c1", To: metadata, Protocol: "udp", Port: 80, TimeoutSeconds: 4}, func() {
		datagram(t, booted.Namespace, metadata, 80)
		if got := tables(t); got != nil {
			t.Errorf("a trace has the tables %q", got)
		}
	}))
	if got.end.Verdict != api.Dropped || !got.has("iptables: not followed: iptables is of the flavour legacy", "of all its flows") ||
		!got.has("iptables: filter "+ep.Generation.Chain()+" ", "packets of all flows of "+ep.Address.String()+" meanwhile") || !strings.Contains(got.end.Because, "-j REJECT") {
		t.Errorf("child to the metadata address: %s", got)
	}
}
