package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

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

// A table that somebody deletes closes what it decides, is named, and made again.
func TestDeletedTable(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10")
	l.apply(documents(t, "sg g {ingress: [{protocol: tcp, ports: [{port: 80}]}]}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}\n"))
	asked := func() bool { l.forget(); return l.in(peerAddr, protoTCP, tcp(9, 80, synFlag)) }
	if !asked() {
		t.Fatal("the rule does not allow")
	}
	p := l.d.Policy()
	tables, err := p.Tables(classifier.Small)
	if err != nil || len(tables) != 1 {
		t.Fatalf("tables %v, %v, want one", tables, err)
	}
	if err := p.DeleteTable(classifier.Small, tables[0]); err != nil {
		t.Fatal(err)
	}
	if asked() {
		t.Error("without its table the rule allows")
	}
	for _, want := range []string{"no table", ""} {
		says, err := l.enforce.CheckEndpoint(l.eps[0].Address)
		if err != nil || (len(says) > 0) != (want != "") || !strings.Contains(strings.Join(says, ""), want) {
			t.Errorf("CHECK: %q, %v, want %q", says, err, want)
		}
		if _, err := l.enforce.SetEndpoint(l.wanted(l.eps[0])); err != nil {
			t.Fatal(err)
		}
	}
	if !asked() {
		t.Error("the table is not back")
	}
}
