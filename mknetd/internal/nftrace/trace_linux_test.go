package nftrace

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

const patience = 60 * time.Second

// lab is a host that translates what a client behind it sends to the internet.
func lab(t *testing.T) (client *netlab.Namespace) {
	t.Helper()
	netlab.Clean(t)
	t.Cleanup(func() { noTables(t) })
	netlab.Uplink(t, "1400")
	client = netlab.New(t)
	netlab.Run(t, "ip", "link", "add", "c0", "type", "veth", "peer", "name", "eth0", "netns", client.Name)
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "c0") })
	netlab.Run(t, "ip", "addr", "add", "172.30.0.1/30", "dev", "c0")
	netlab.Run(t, "ip", "link", "set", "c0", "up")
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600); err != nil {
		t.Fatal(err)
	}
	client.Run(t, "ip", "addr", "add", child.String()+"/30", "dev", "eth0")
	client.Run(t, "ip", "link", "set", "eth0", "up")
	client.Run(t, "ip", "route", "add", "default", "via", "172.30.0.1")
	for _, r := range []string{
		"-t nat -A POSTROUTING -s 172.30.0.2 -o up0 -j MASQUERADE",
		"-A FORWARD -s 172.30.0.2 -p udp --dport 9 -j DROP",
		"-A FORWARD -d 172.30.0.2 -p icmp -j ACCEPT",
	} {
		words := strings.Fields(r)
		netlab.Run(t, "iptables-nft", words...)
		t.Cleanup(func() { netlab.Run(t, "iptables-nft", strings.Fields(strings.Replace(r, "-A", "-D", 1))...) })
	}
	return client
}

// tables are those of this package that the kernel has.
func tables(t *testing.T) (found []string) {
	t.Helper()
	for line := range strings.Lines(netlab.Run(t, "nft", "list", "tables")) {
		if strings.Contains(line, endpoint.TraceTablePrefix) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

func noTables(t *testing.T) {
	t.Helper()
	if left := tables(t); left != nil {
		t.Errorf("left behind: %q", left)
	}
}

func begin(t *testing.T, f Filter) *Trace {
	t.Helper()
	tr, err := Open(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := tr.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return tr
}

// until reads steps up to one that says all of it.
func until(t *testing.T, tr *Trace, words string) (all []Step) {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case s := <-tr.Steps():
			if all = append(all, s); strings.Contains(say(s), words) {
				return all
			}
		case <-limit:
			t.Fatalf("nobody said %q, only %+v", words, all)
		}
	}
}

func say(s Step) string {
	by := "policy"
	if s.Handle != 0 {
		by = "rule"
	}
	return fmt.Sprintf("reply %t %s %s %s %s %s", s.Packet.Reply, s.Family, s.Table, s.Chain, by, s.Verdict)
}

// The way of a translated packet and of its answer, and nothing of other flows of
// the same client at the same time.
func TestTraceOfOneFlow(t *testing.T) {
	client := lab(t)
	before := netlab.Take()
	echo := begin(t, Filter{From: child, To: world, Protocol: unix.IPPROTO_ICMP})
	dropped := begin(t, Filter{From: child, To: world, Protocol: unix.IPPROTO_UDP, Port: 9})
	silent := begin(t, Filter{From: child, To: netip.MustParseAddr("198.51.100.7"), Protocol: unix.IPPROTO_ICMP})
	if got := tables(t); len(got) != 3 {
		t.Errorf("three traces have the tables %q", got)
	}
	if left := before.Left(); !slices.Contains(left, "nft: "+echo.Table()) {
		t.Errorf("what has come to the host lacks the table %s: %q", echo.Table(), left)
	}
	client.Run(t, "ping", "-n", "-c1", "-W20", world.String())
	client.Run(t, "bash", "-c", "echo x > /dev/udp/"+world.String()+"/9")
	client.Run(t, "bash", "-c", "echo x > /dev/udp/"+world.String()+"/10")
	client.Run(t, "ping", "-n", "-c1", "-W20", world.String())
	var there, back bool
	for _, s := range until(t, echo, "reply true ip filter FORWARD rule accept") {
		there = there || say(s) == "reply false ip nat POSTROUTING rule accept"
		back = back || s.Packet.Reply && s.Packet.Source == world && s.Packet.Destination == child
		if s.Packet.DestinationPort != 0 || s.Packet.Bytes != 84 {
			t.Errorf("%+v", s)
		}
	}
	if !there || !back {
		t.Errorf("MASQUERADE was told: %t; the answer: %t", there, back)
	}
	steps := until(t, dropped, "filter FORWARD rule drop")
	if last := steps[len(steps)-1]; last.Packet.DestinationPort != 9 || last.Packet.Number != 1 || last.Handle == 0 {
		t.Errorf("%+v", last)
	}
	select {
	case s := <-dropped.Steps():
		t.Errorf("of another flow: %+v", s)
	case s := <-silent.Steps():
		t.Errorf("of a flow that nobody sends: %+v", s)
	default:
	}
	for _, tr := range []*Trace{echo, dropped, silent} {
		if n, err := tr.LeftOut(); n != 0 || err != nil || tr.Lost() != 0 {
			t.Errorf("%d packets left out, %v, %d steps lost", n, err, tr.Lost())
		}
	}
}

// A busy flow is traced in part, and what is left out is counted.
func TestTraceOfABusyFlow(t *testing.T) {
	client := lab(t)
	tr := begin(t, Filter{From: child, To: world, Protocol: unix.IPPROTO_ICMP})
	const sent = 400
	client.Run(t, "ping", "-n", "-q", "-c", fmt.Sprint(sent), "-i", "0.002", "-W20", world.String())
	left, err := tr.LeftOut()
	if err != nil || left == 0 || left >= 2*sent {
		t.Errorf("%d packets were left out, %v", left, err)
	}
	told := map[int]bool{}
	for limit := time.After(patience); uint64(len(told))+left < 2*sent; {
		select {
		case s := <-tr.Steps():
			told[s.Packet.Number] = true
		case <-limit:
			t.Fatalf("%d packets are told and %d left out, want %d together", len(told), left, 2*sent)
		}
	}
	if lost := tr.Lost(); lost != 0 {
		t.Errorf("%d steps were lost", lost)
	}
}

func TestFilterIsRefused(t *testing.T) {
	t.Parallel()
	for _, f := range []Filter{{}, {From: child}, {From: child, To: netip.MustParseAddr("::1")}} {
		if _, err := Open(f); err == nil || !strings.Contains(err.Error(), "must be IPv4 addresses") {
			t.Errorf("%+v: %v", f, err)
		}
	}
}
