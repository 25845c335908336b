package enforcer_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"mknet/mknetd/internal/classifier"
	"mknet/mknetd/internal/enforcer"
	"mknet/spec/policy"
)

var pools = policy.Pools{"pods": netip.MustParsePrefix("10.0.0.0/28")}

// endpoints are ten, by number, of which the last lie outside of the pool.
func endpoints(names ...int) []enforcer.Endpoint {
	var out []enforcer.Endpoint
	for _, i := range names {
		out = append(out, enforcer.Endpoint{ID: uint64(i), Endpoint: policy.Endpoint{
			Address: addr(i), Network: "net", Namespace: fmt.Sprint("ns", i%2), Name: fmt.Sprint("pod", i),
		}})
	}
	return out
}

func addr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(10 + i)}) }

// state is documents, their numbers and endpoints.
type state struct {
	set       *policy.Set
	numbers   enforcer.Numbers
	endpoints []enforcer.Endpoint
}

// parse makes a state of documents in a short form: "acl NAME SPEC",
// "sg NAME SPEC", "at NAME SPEC".
func parse(t *testing.T, eps []enforcer.Endpoint, docs ...string) state {
	t.Helper()
	var text strings.Builder
	for _, d := range docs {
		parts := strings.SplitN(d, " ", 3)
		kind := map[string]policy.Kind{"acl": policy.KindNetworkACL, "sg": policy.KindSecurityGroup, "at": policy.KindAttachment}[parts[0]]
		fmt.Fprintf(&text, "---\napiVersion: mknet/v1\nkind: %s\nmetadata: {name: %s}\nspec: %s\n", kind, parts[1], parts[2])
	}
	objects, err := policy.Parse([]byte(text.String()))
	if err != nil {
		t.Fatal(err)
	}
	return newState(t, eps, objects)
}

func newState(t *testing.T, eps []enforcer.Endpoint, objects []policy.Object) state {
	t.Helper()
	set, err := policy.NewSet(objects...)
	if err != nil {
		t.Fatal(err)
	}
	s := state{set: set, numbers: enforcer.Numbers{}, endpoints: eps}
	for i, name := range []string{"NetworkACL/a", "NetworkACL/b", "SecurityGroup/web", "SecurityGroup/db", "SecurityGroup/ops", "SecurityGroup/big"} {
		kind, n, _ := strings.Cut(name, "/")
		s.numbers[policy.Key{Kind: policy.Kind(kind), Name: n}] = uint32(i + 1)
	}
	return s
}

func (s state) world() *policy.World {
	var eps []policy.Endpoint
	for _, e := range s.endpoints {
		eps = append(eps, e.Endpoint)
	}
	return policy.NewWorld(s.set, pools, eps...)
}

func packets() []policy.Packet {
	r := rand.New(rand.NewPCG(1, 1))
	peers := []netip.Addr{netip.MustParseAddr("8.8.8.8"), netip.MustParseAddr("10.9.9.9")}
	for i := range 10 {
		peers = append(peers, addr(i))
	}
	var out []policy.Packet
	for range 150 {
		p := policy.Packet{Source: peers[r.IntN(len(peers))], Destination: peers[r.IntN(len(peers))], Protocol: []uint8{0, 1, 6, 6, 6, 17}[r.IntN(6)], DestinationPort: []uint16{80, 81, 443, 5432}[r.IntN(4)]}
		switch r.IntN(20) {
		case 0:
			p.Unreadable = true
		case 1:
			p.Frame = policy.OtherFrame
		case 2:
			p.Frame = policy.ARP
		}
		out = append(out, p)
	}
	return out
}

// verdicts judges every packet at both points of every endpoint.
func verdicts(judge func(policy.Direction, netip.Addr, policy.Packet) policy.Reason) []policy.Reason {
	var out []policy.Reason
	for _, p := range packets() {
		out = append(out, judge(policy.Egress, p.Source, p), judge(policy.Ingress, p.Destination, p))
	}
	return out
}

func modelVerdicts(s state) []policy.Reason {
	w := s.world()
	return verdicts(func(d policy.Direction, self netip.Addr, p policy.Packet) policy.Reason {
		got := w.Judge(d, self, p)
		return got.Steps[len(got.Steps)-1].Reason
	})
}

func mapVerdicts(t *testing.T, f *fake) []policy.Reason {
	t.Helper()
	return verdicts(func(d policy.Direction, self netip.Addr, p policy.Packet) policy.Reason {
		return f.judge(t, d, self, p)
	})
}

// same treats the ways in which nothing is judged as one: the model has no point
// for what is not an endpoint, before it looks at the frame.
func same(a, b policy.Reason) bool {
	nothing := func(r policy.Reason) bool { return r == policy.NoEndpoint || r == policy.NotEnforced }
	return a == b || nothing(a) && nothing(b)
}

func check(t *testing.T, f *fake, s state) {
	t.Helper()
	want := modelVerdicts(s)
	for i, got := range mapVerdicts(t, f) {
		if !same(got, want[i]) {
			t.Fatalf("packet %+v (%d): the maps say %s, the model %s", packets()[i/2], i, got, want[i])
		}
	}
}

// scenarios are states that follow each other.
func scenarios(t *testing.T) []state {
	some, more := endpoints(0, 1, 2, 3, 8), endpoints(0, 1, 2, 3, 4, 9)
	web := "sg web {ingress: [{protocol: tcp, ports: [{port: 80}]}]}"
	db := "sg db {egressDefault: deny, ingress: [{from: [{securityGroupRef: {name: web}}], protocol: tcp, ports: [{port: 5432}]}]}"
	attachWeb := "at web {securityGroupRefs: [{name: web}], endpoints: [{name: pod0}, {name: pod1}]}"
	attachDB := "at db {securityGroupRefs: [{name: db}], endpoints: [{namespace: ns1}]}"
	return []state{
		parse(t, nil, "acl a {}"),
		parse(t, some, "acl a {}"),
		parse(t, some, "acl a {}", "at a {networkACLRef: {name: a}, pools: [pods]}"),
		parse(t, some, "acl a {ingress: [{priority: 5, action: deny, cidr: 8.0.0.0/8}, {priority: 9, action: allow}]}", "at a {networkACLRef: {name: a}, pools: [pods]}"),
		parse(t, some, "acl a {ingress: [{priority: 5, action: allow, cidr: 8.0.0.0/8}], egress: [{priority: 1, action: allow, protocol: tcp}]}", "at a {networkACLRef: {name: a}, pools: [pods]}", web, db, attachWeb, attachDB),
		parse(t, more, "acl b {egress: [{priority: 1, action: deny, protocol: icmp}, {priority: 2, action: allow}]}", "at a {networkACLRef: {name: b}, subnets: [10.0.0.12/30]}", web, db, attachWeb, attachDB),
		parse(t, more, web, db, attachWeb, strings.Replace(attachDB, "ns1", "ns0", 1)),
		parse(t, endpoints(1), web, "sg db {egress: [{protocol: udp}]}", attachWeb, attachDB),
		parse(t, more, web, "sg ops {ingress: [{from: [{securityGroupRef: {name: ops}}]}]}", "at ops {securityGroupRefs: [{name: ops}, {name: web}], endpoints: [{network: net}]}"),
		parse(t, nil, "acl a {}"),
	}
}

func apply(t *testing.T, e *enforcer.Enforcer, s state) {
	t.Helper()
	if err := e.Apply(s.set, s.numbers, s.endpoints); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, f *fake) *enforcer.Enforcer {
	t.Helper()
	e, err := enforcer.Open(f, pools)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// tidy checks that nothing is left that nobody needs.
func tidy(t *testing.T, f *fake) {
	t.Helper()
	named := 0
	for _, w := range f.slots {
		if enforcer.SlotOf(w).Class != 0 {
			named++
		}
	}
	if n := len(f.tables[0]) + len(f.tables[1]) + len(f.tables[2]); n != named {
		t.Errorf("%d tables, slots name %d", n, named)
	}
}

func TestMapsAgreeWithModel(t *testing.T) {
	f := newFake()
	e := open(t, f)
	for i, s := range scenarios(t) {
		apply(t, e, s)
		check(t, f, s)
		tidy(t, f)
		if t.Failed() {
			t.Fatalf("scenario %d", i)
		}
	}
	if len(f.points) != 0 || len(f.identities) != 0 {
		t.Errorf("%d points and %d identities are left", len(f.points), len(f.identities))
	}
}

// TestD16EveryStepMayFail fails each step of each change in turn, and looks at the
// maps after every single write: each verdict is the old or the new one. Then the
// same daemon goes on, or another begins; both arrive.
func TestD16EveryStepMayFail(t *testing.T) {
	all := scenarios(t)
	for i := 1; i < len(all); i++ {
		from, to := all[i-1], all[i]
		old, done := newFake(), newFake()
		apply(t, open(t, old), from)
		e := open(t, done)
		apply(t, e, from)
		apply(t, e, to)
		allowed := mixtures(t, old, done)
		for fail := 1; ; fail++ {
			f := newFake()
			e := open(t, f)
			apply(t, e, from)
			f.ops, f.failAt = nil, fail
			f.seen = func() { oldOrNew(t, f, allowed) }
			err := e.Apply(to.set, to.numbers, to.endpoints)
			if err == nil {
				if len(f.ops) >= fail {
					t.Fatalf("change %d: step %d (%s) failed and nobody was told", i, fail, f.ops[fail-1])
				}
				break // all steps were failed
			}
			if !errors.Is(err, errInjected) || e.Status().Err == nil {
				t.Fatalf("change %d, step %d: got %v, status %+v", i, fail, err, e.Status())
			}
			oldOrNew(t, f, allowed)
			other := f.clone()
			f.failAt = 0
			if err := e.Retry(); err != nil {
				t.Fatalf("change %d, step %d, again: %v", i, fail, err)
			}
			check(t, f, to)
			tidy(t, f)
			apply(t, open(t, other), to)
			check(t, other, to)
			tidy(t, other)
			if t.Failed() {
				t.Fatalf("change %d, step %d of %v", i, fail, f.ops)
			}
		}
	}
}

// mixtures returns, for each verdict, those that may be seen while one state of the
// maps becomes the other: the point, the peer's identity and each policy are each
// whole, as they were or as they will be.
func mixtures(t *testing.T, before, after *fake) []map[policy.Reason]bool {
	t.Helper()
	both := [2]*fake{before, after}
	var out []map[policy.Reason]bool
	for choice := range 1 << (maxNumber + 2) {
		pick := func(bit int) *fake { return both[choice>>bit&1] }
		mix := newFake()
		for i := range mix.tables {
			maps.Copy(mix.tables[i], before.tables[i])
			maps.Copy(mix.tables[i], after.tables[i])
		}
		for i := range uint32(2 * (maxNumber + 1)) {
			for _, from := range []*fake{pick(int(i / 2)), before, after} {
				if w, ok := from.slots[i]; ok {
					mix.slots[i] = w
					break
				}
			}
		}
		mix.points, mix.identities = pick(0).points, pick(maxNumber+1).identities
		for i, v := range mapVerdicts(t, mix) {
			if choice == 0 {
				out = append(out, map[policy.Reason]bool{})
			}
			out[i][v] = true
		}
	}
	return out
}

// maxNumber is the highest number that newState gives.
const maxNumber = 6

// oldOrNew checks each verdict against what is allowed.
func oldOrNew(t *testing.T, f *fake, allowed []map[policy.Reason]bool) {
	t.Helper()
	for i, got := range mapVerdicts(t, f) {
		if !allowed[i][got] {
			t.Fatalf("packet %+v (%d): %s, want one of %v", packets()[i/2], i, got, allowed[i])
		}
	}
}

func TestResyncWritesNothing(t *testing.T) {
	f := newFake()
	e := open(t, f)
	s := scenarios(t)[5]
	apply(t, e, s)
	f.ops = nil
	again := newState(t, s.endpoints, s.set.Objects())
	apply(t, e, again)
	// The same documents, read once more: other objects.
	apply(t, e, scenarios(t)[5])
	if len(f.ops) != 0 {
		t.Errorf("got %v, want nothing", f.ops)
	}
}

func epochs(t *testing.T, f *fake, i int) [2]uint32 {
	t.Helper()
	points, err := f.Points()
	if err != nil {
		t.Fatal(err)
	}
	return points[addr(i)].Epoch
}

// Only what a change concerns is judged again.
func TestEpochs(t *testing.T) {
	web := "sg web {ingress: [{from: [{securityGroupRef: {name: db}}]}]}"
	attach := "at web {securityGroupRefs: [{name: web}], endpoints: [{name: pod0}]}"
	db, attachDB := "sg db {}", "at db {securityGroupRefs: [{name: db}], endpoints: [{name: pod1}]}"
	base := []string{web, attach, db, attachDB}
	eps := endpoints(0, 1, 2)
	for _, c := range []struct {
		name   string
		docs   []string
		raised string // endpoint and direction
		ops    string // writes
	}{
		{"a rule of ingress", []string{strings.Replace(web, "name: db}}", "name: db}}, {cidr: 8.8.8.8/32}", 1), attach, db, attachDB}, "0:ingress", "insert slot point barrier read delete"},
		{"the first rule of egress", []string{"sg web {ingress: [{from: [{securityGroupRef: {name: db}}]}], egress: [{}]}", attach, db, attachDB}, "0:egress", "insert slot point"},
		{"egressDefault", []string{web, attach, "sg db {egressDefault: deny}", attachDB}, "1:egress", "slot point"},
		{"the order of peers", base, "", ""},
		{"a group that nobody holds", append([]string{"sg ops {ingress: [{}]}"}, base...), "", "slot insert slot"},
		{"attached to one more", append([]string{"at more {securityGroupRefs: [{name: web}], endpoints: [{name: pod2}]}"}, base...), "2:egress 2:ingress", "identity point"},
		{"membership of a peer revoked", []string{web, attach, db}, "1:egress 1:ingress", "unidentity point"},
		{"an ACL", append([]string{"acl a {ingress: [{priority: 1, action: allow}]}", "at acl {networkACLRef: {name: a}, subnets: [10.0.0.12/32]}"}, base...), "2:egress 2:ingress", "slot insert slot point"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake()
			e := open(t, f)
			apply(t, e, parse(t, eps, base...))
			before := [][2]uint32{epochs(t, f, 0), epochs(t, f, 1), epochs(t, f, 2)}
			f.ops = nil
			apply(t, e, parse(t, eps, c.docs...))
			var raised []string
			for i := range eps {
				for j, d := range policy.Directions {
					if now := epochs(t, f, i)[j]; now > before[i][j] {
						raised = append(raised, fmt.Sprintf("%d:%s", i, d))
					}
				}
			}
			if got := strings.Join(raised, " "); got != c.raised {
				t.Errorf("raised: got %q, want %q", got, c.raised)
			}
			if got := strings.Join(f.ops, " "); got != c.ops {
				t.Errorf("writes: got %q, want %q", got, c.ops)
			}
		})
	}
}

// The flag of enforcement follows the rules, and costs the other direction nothing.
func TestEnforcedFlag(t *testing.T) {
	at := "at a {networkACLRef: {name: a}, pools: [pods]}"
	f := newFake()
	e := open(t, f)
	apply(t, e, parse(t, endpoints(0), "acl a {}", at))
	before := epochs(t, f, 0)
	apply(t, e, parse(t, endpoints(0), "acl a {egress: [{priority: 1, action: deny}]}", at))
	points, err := f.Points()
	if err != nil {
		t.Fatal(err)
	}
	p := points[addr(0)]
	if p.Flags != enforcer.PointAttached|enforcer.PointEgress || p.Epoch[0] <= before[0] || p.Epoch[1] != before[1] {
		t.Errorf("got %+v, before %v", p, before)
	}
}

func TestEndpointsComeAndGo(t *testing.T) {
	f := newFake()
	e := open(t, f)
	s := scenarios(t)[4]
	apply(t, e, s)
	old := epochs(t, f, 0)
	for i := range 2 {
		if changed, err := e.RemoveEndpoint(s.endpoints[0]); err != nil || changed != (i == 0) {
			t.Fatalf("removal %d: %v, %v", i+1, changed, err)
		}
	}
	if _, ok := f.points[addr(0)]; ok || len(f.identities) != 2 {
		t.Errorf("the point is left, or identities are %d", len(f.identities))
	}
	for i := range 2 {
		if changed, err := e.SetEndpoint(s.endpoints[0]); err != nil || changed != (i == 0) {
			t.Fatalf("addition %d: %v, %v", i+1, changed, err)
		}
	}
	if now := epochs(t, f, 0); now[0] <= old[0] || now[1] <= old[1] {
		t.Errorf("an address that came back has epochs %v, before %v: it inherits admissions", now, old)
	}
	check(t, f, s)
}

// A late removal of an address's earlier owner takes nothing from the one that has it
// now.
func TestRemovalSparesTheNextOwner(t *testing.T) {
	f := newFake()
	e := open(t, f)
	s := scenarios(t)[4]
	apply(t, e, s)
	next := s
	next.endpoints = slices.Clone(s.endpoints)
	next.endpoints[0].ID = 99
	if _, err := e.SetEndpoint(next.endpoints[0]); err != nil {
		t.Fatal(err)
	}
	if changed, err := e.RemoveEndpoint(s.endpoints[0]); err != nil || changed {
		t.Errorf("removal of the earlier owner: changed %v, %v", changed, err)
	}
	check(t, f, next)
	if changed, err := e.RemoveEndpoint(next.endpoints[0]); err != nil || !changed {
		t.Errorf("removal of the owner: changed %v, %v", changed, err)
	}
}

// What somebody else does to the entries of an endpoint is found, and put right by
// SetEndpoint: with new epochs, so that nothing is admitted under what stood there.
func TestAlteredEntries(t *testing.T) {
	first := addr(0)
	for _, c := range []struct {
		name, says string
		harm       func(f *fake)
	}{
		{"no point", "missing: ", func(f *fake) { delete(f.points, first) }},
		{"no ACL", "has the NetworkACL with number 0, want 1", func(f *fake) { f.alter(first, func(p *enforcer.Point) { p.ACL = 0 }) }},
		{"no groups", "has the SecurityGroups with numbers [], want [3]", func(f *fake) { f.alter(first, func(p *enforcer.Point) { p.Groups[0] = 0 }) }},
		{"flags", "has flags 0x0", func(f *fake) { f.alter(first, func(p *enforcer.Point) { p.Flags = 0 }) }},
		{"an old epoch", "is not the value", func(f *fake) { f.alter(first, func(p *enforcer.Point) { p.Epoch[1]-- }) }},
		{"no peer", "missing as a peer", func(f *fake) { delete(f.identities, first) }},
		{"another peer", "is not the peer", func(f *fake) { b := f.identities[first]; b[8]++; f.identities[first] = b }},
		{"a slot emptied", "policy number 1 has another slot for ingress", func(f *fake) { delete(f.slots, enforcer.SlotIndex(1, policy.Ingress)) }},
		{"a slot opened", "policy number 3 has another slot for ingress", func(f *fake) {
			f.slots[enforcer.SlotIndex(3, policy.Ingress)] = enforcer.Slot{Flags: enforcer.SlotValid}.Word()
		}},
		{"a table deleted", "policy number 1 has no table", func(f *fake) {
			slot := enforcer.SlotOf(f.slots[enforcer.SlotIndex(1, policy.Ingress)])
			delete(f.tables[classifier.Class(slot.Class-1)], slot.Generation)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake()
			e := open(t, f)
			s := parse(t, endpoints(0, 1), "acl a {ingress: [{priority: 1, action: allow, protocol: tcp}]}", "sg web {ingress: [{}]}",
				"at a {networkACLRef: {name: a}, pools: [pods], securityGroupRefs: [{name: web}], endpoints: [{name: pod0}]}")
			apply(t, e, s)
			if says, err := e.CheckEndpoint(first); err != nil || len(says) > 0 {
				t.Fatalf("before: %q, %v", says, err)
			}
			before := epochs(t, f, 0)
			c.harm(f)
			says, err := e.CheckEndpoint(first)
			if err != nil || len(says) != 1 || !strings.HasPrefix(says[0], c.says) {
				t.Errorf("got %q, %v, want %q", says, err, c.says)
			}
			for i := range 2 {
				if changed, err := e.SetEndpoint(s.endpoints[0]); err != nil || changed != (i == 0) {
					t.Errorf("mended: %v, %v (time %d)", changed, err, i+1)
				}
			}
			if says, err := e.CheckEndpoint(first); err != nil || len(says) > 0 {
				t.Errorf("after: %q, %v", says, err)
			}
			check(t, f, s)
			if strings.Contains(c.says, "peer") {
				return
			}
			if now := epochs(t, f, 0); now[1] <= before[1] {
				t.Errorf("ingress epoch is %d, was %d", now[1], before[1])
			}
		})
	}
	f := newFake()
	e := open(t, f)
	apply(t, e, parse(t, endpoints(0), "acl a {}"))
	if says, err := e.CheckEndpoint(addr(5)); err != nil || len(says) != 1 || !strings.HasPrefix(says[0], "missing") {
		t.Errorf("an endpoint that was never written: %q, %v", says, err)
	}
}

// A policy that cannot be loaded keeps its old rules, and holds up no endpoint
// that does not need it.
func TestStuckPolicy(t *testing.T) {
	f := newFake()
	e := open(t, f)
	first := parse(t, endpoints(0), "sg web {ingress: [{}]}", "at web {securityGroupRefs: [{name: web}], endpoints: [{name: pod0}, {name: pod1}]}")
	apply(t, e, first)
	next := parse(t, endpoints(0), "sg web {}", "sg ops {ingress: [{protocol: tcp}]}", "at web {securityGroupRefs: [{name: web}], endpoints: [{name: pod0}, {name: pod1}]}", "at ops {securityGroupRefs: [{name: ops}], endpoints: [{name: pod2}]}")
	stuck := &noTables{f}
	e, err := enforcer.Open(stuck, pools)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Apply(next.set, next.numbers, next.endpoints); !errors.Is(err, errInjected) {
		t.Fatalf("got %v", err)
	}
	if _, err := e.SetEndpoint(endpoints(1)[0]); err != nil {
		t.Errorf("an endpoint of a loaded policy: %v", err)
	}
	if _, err := e.SetEndpoint(endpoints(2)[0]); err == nil {
		t.Errorf("an endpoint whose policy is not loaded was let in")
	}
	if _, ok := f.points[addr(2)]; ok {
		t.Errorf("it has a point that names an empty slot")
	}
}

type noTables struct{ *fake }

func (noTables) InsertTable(_ classifier.Class, _ uint32, _ []byte) error { return errInjected }

func TestOverLimit(t *testing.T) {
	big := &policy.SecurityGroup{Header: policy.Header{APIVersion: policy.APIVersion, Kind: policy.KindSecurityGroup, Metadata: policy.Metadata{Name: "big"}}}
	for range policy.MaxRules + 1 {
		big.Spec.Ingress = append(big.Spec.Ingress, policy.GroupIngress{Protocol: policy.AnyProtocol})
	}
	at := parse(t, nil, "sg big {}", "at t {securityGroupRefs: [{name: big}], endpoints: [{name: pod0}]}").set.Objects()
	s := newState(t, endpoints(0), []policy.Object{big, at[0]})
	f := newFake()
	e := open(t, f)
	apply(t, e, s)
	check(t, f, s)
	want := []string{"SecurityGroup/big ingress is closed: it has 1025 rules, at most 1024 fit"}
	if got := e.Status().Closed; !slices.Equal(got, want) {
		t.Errorf("status: got %q, want %q", got, want)
	}
	out := policy.Packet{Source: addr(0), Destination: addr(5), Protocol: 6}
	if got := f.judge(t, policy.Egress, addr(0), out); got != policy.GroupPass {
		t.Errorf("egress: got %s, want open", got)
	}
}

func TestCounts(t *testing.T) {
	at := "at a {networkACLRef: {name: a}, pools: [pods]}"
	f := newFake()
	e := open(t, f)
	apply(t, e, parse(t, endpoints(0), "acl a {ingress: [{priority: 5, action: allow, protocol: tcp}, {priority: 2, action: deny, protocol: udp}]}", at))
	send := func(proto uint8, n int) {
		for range n {
			f.judge(t, policy.Ingress, addr(0), policy.Packet{Source: addr(7), Destination: addr(0), Protocol: proto})
		}
	}
	send(6, 3)
	send(17, 2)
	apply(t, e, parse(t, endpoints(0), "acl a {ingress: [{priority: 1, action: deny, protocol: icmp}, {priority: 5, action: allow, protocol: tcp}]}", at))
	send(6, 4)
	send(1, 1)
	got, err := e.Counts(policy.Key{Kind: policy.KindNetworkACL, Name: "a"}, policy.Ingress)
	want := []enforcer.RuleCount{{Rule: "spec.ingress[0]", Packets: 1}, {Rule: "spec.ingress[1]", Packets: 7}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func TestLayout(t *testing.T) {
	p := enforcer.Point{ACL: 1, Groups: [16]uint32{2, 3}, Epoch: [2]uint32{4, 5}, Flags: 6, ID: 7, Version: 8}
	b := p.Encode(addr(0))
	a, back, err := enforcer.DecodePoint(b[:])
	if err != nil || a != addr(0) || back != p {
		t.Errorf("point: got %s %+v, %v", a, back, err)
	}
	id := enforcer.Identity{Epoch: 1, Groups: [16]uint32{2, 3}, Version: 4}
	ib := id.Encode(addr(1))
	a, idBack, err := enforcer.DecodeIdentity(ib[:])
	if err != nil || a != addr(1) || idBack != id {
		t.Errorf("identity: got %s %+v, %v", a, idBack, err)
	}
	s := enforcer.Slot{Generation: 0x01020304, Class: 5, Flags: 6}
	if w := s.Word(); w != 0x0000060501020304 || enforcer.SlotOf(w) != s {
		t.Errorf("slot: got %#x", w)
	}
}
