package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mknet/mknetd/internal/classifier"
	"mknet/mknetd/internal/enforcer"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

var errInjected = errors.New("injected")

// failing is the maps with a change that fails: the one numbered at, from 1.
type failing struct {
	*PolicyMaps
	at, n int
	seen  func() // after every change
}

func (f *failing) do(change func() error) error {
	if f.n++; f.n == f.at {
		return errInjected
	}
	err := change()
	if f.seen != nil {
		f.seen()
	}
	return err
}

func (f *failing) InsertTable(c classifier.Class, g uint32, b []byte) error {
	return f.do(func() error { return f.PolicyMaps.InsertTable(c, g, b) })
}

func (f *failing) DeleteTable(c classifier.Class, g uint32) error {
	return f.do(func() error { return f.PolicyMaps.DeleteTable(c, g) })
}

func (f *failing) SetSlot(i uint32, s enforcer.Slot) error {
	return f.do(func() error { return f.PolicyMaps.SetSlot(i, s) })
}

func (f *failing) PutPoint(a netip.Addr, p enforcer.Point) error {
	return f.do(func() error { return f.PolicyMaps.PutPoint(a, p) })
}

func (f *failing) PutIdentity(a netip.Addr, id enforcer.Identity) error {
	return f.do(func() error { return f.PolicyMaps.PutIdentity(a, id) })
}

func (f *failing) DeleteIdentity(a netip.Addr) error {
	return f.do(func() error { return f.PolicyMaps.DeleteIdentity(a) })
}

func (f *failing) Barrier() error { return f.do(f.PolicyMaps.Barrier) }

// D16: whatever step of a change fails, and whether the daemon dies there or goes
// on, packets meet the old rules or the new ones: never none, never all.
func TestD16FailedChange(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	docs := func(port int) []policy.Object {
		return documents(t, fmt.Sprintf("sg g {ingress: [{protocol: tcp, ports: [{port: %d}]}]}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}\nsg h {}\n", port)+
			map[bool]string{true: "at h {securityGroupRefs: [{name: h}], endpoints: [{name: ep1}]}"}[port == 81])
	}
	state := func() string {
		l.forget()
		switch a, b := l.in(peerAddr, protoTCP, tcp(9, 80, synFlag)), l.in(peerAddr, protoTCP, tcp(9, 81, synFlag)); {
		case a && !b:
			return "old"
		case b && !a:
			return "new"
		}
		return "neither"
	}
	k := &failing{PolicyMaps: l.d.Policy()}
	check := func(when string) {
		t.Helper()
		if s := state(); s == "neither" {
			t.Errorf("change %d, %s: packets meet neither the old rules nor the new", k.n, when)
		}
	}
	for at := 1; ; at++ {
		k.at = 0
		e, err := enforcer.Open(k, l.pools)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.applyTo(e, docs(80)); err != nil {
			t.Fatal(err)
		}
		if s := state(); s != "old" {
			t.Fatalf("before change %d: packets meet %s rules", at, s)
		}
		k.at, k.n, k.seen = at, 0, func() { check("between steps") }
		err = l.applyTo(e, docs(81))
		done := k.n < at
		if (err == nil) != done || err != nil && !errors.Is(err, errInjected) {
			t.Fatalf("change %d: %v", at, err)
		}
		check("after the error")
		k.at = 0
		if at%2 == 0 { // the daemon dies, and another comes
			if e, err = enforcer.Open(k, l.pools); err != nil {
				t.Fatal(err)
			}
			check("after the start")
			err = l.applyTo(e, docs(81))
		} else {
			err = e.Retry()
		}
		if err != nil {
			t.Errorf("change %d, tried again: %v", at, err)
		}
		if s := state(); s != "new" {
			t.Errorf("change %d, tried again: packets meet %s rules", at, s)
		}
		k.seen = nil
		if done {
			if at < 6 {
				t.Errorf("a change has only %d steps", at-1)
			}
			return
		}
	}
}

// D12: a set over the limit that is loaded all the same closes that direction and
// no other.
func TestD12OverLimitClosesOneDirection(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	big := &policy.SecurityGroup{Header: policy.Header{APIVersion: policy.APIVersion, Kind: policy.KindSecurityGroup, Metadata: policy.Metadata{Name: "g"}}}
	for range policy.MaxRules + 1 {
		big.Spec.Ingress = append(big.Spec.Ingress, policy.GroupIngress{Protocol: policy.AnyProtocol})
	}
	l.apply(append(documents(t, "at g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}\nsg g {}")[:1], big))
	if l.in(peerAddr, protoTCP, tcp(1, 2, synFlag)) {
		t.Error("the direction over the limit is open")
	}
	if !l.out(peerAddr, protoTCP, tcp(1, 2, synFlag)) {
		t.Error("the other direction is closed")
	}
	if s := l.enforce.Status(); len(s.Closed) != 1 {
		t.Errorf("status names %q", s.Closed)
	}
}

// D5: new flows as fast as they come, and the collector over and over: nothing
// that is allowed is dropped, and every reply passes.
func TestD5CollectorUnderLoad(t *testing.T) {
	l := newPolicyLab(t, Config{Flows: 65536}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, clientOnly))
	var passes atomic.Int64
	var failed error
	stop := make(chan struct{})
	var collector sync.WaitGroup
	collector.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := l.d.Policy().Collect(); err != nil {
				failed = err
				return
			}
			passes.Add(1)
			runtime.Gosched()
		}
	})
	begin := time.Now()
	flows := 0
	for ; flows < 20_000; flows++ {
		sport, peer := uint16(flows), netip.AddrFrom4([4]byte{1, 2, byte(flows >> 16), 4}).String()
		if !l.out(peer, protoUDP, udp(sport, 53)) || !l.in(peer, protoUDP, udp(53, sport)) {
			t.Errorf("flow %d: a packet is dropped", flows)
			break
		}
	}
	took := time.Since(begin)
	close(stop)
	collector.Wait()
	if failed != nil || passes.Load() < 2 {
		t.Errorf("%d passes of the collector, %v", passes.Load(), failed)
	}
	t.Logf("%d flows in %s (%.0f/s), %d passes of the collector", flows, took.Round(time.Millisecond), float64(flows)/took.Seconds(), passes.Load())
}

// A full table of 262,144 entries is collected and listed in a fraction of a second.
func TestCollectFullTable(t *testing.T) {
	l := newPolicyLab(t, Config{Flows: DefaultFlows}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, clientOnly))
	l.fill(DefaultFlows)
	begin := time.Now()
	list, err := l.d.Policy().Flows()
	listed := time.Since(begin)
	if err != nil || len(list) != DefaultFlows*3/4 {
		t.Errorf("%d flows listed, %v", len(list), err)
	}
	first, err := l.d.Policy().Collect()
	if err != nil || first.Expired != DefaultFlows/4 || first.Entries < DefaultFlows*9/10 {
		t.Errorf("collected %+v, %v", first, err)
	}
	second, err := l.d.Policy().Collect()
	if err != nil || second.Expired != 0 || second.Entries != DefaultFlows*3/4 {
		t.Errorf("collected %+v, %v", second, err)
	}
	t.Logf("%d entries: listed in %s, %d collected in %s, a pass without any in %s", DefaultFlows, listed, first.Expired, first.Took, second.Took)
	for what, took := range map[string]time.Duration{"list": listed, "collect": second.Took} {
		if took > 5*time.Second { // on a busy machine; idle it is below 0.2 s
			t.Errorf("%s: took %s", what, took)
		}
	}
}
