package classifier_test

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"testing"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// compare looks a packet up in three ways.
func compare(t *testing.T, rules policy.Rules, table *classifier.Table, entries []entry, p packet) {
	t.Helper()
	var numbers []uint32
	for _, g := range p.groups {
		numbers = append(numbers, groupNumbers[g])
	}
	rule, allow := table.Lookup(p.addr, policy.PortKey(p.proto, p.port), numbers)
	naive, naiveAllow := scan(entries, p.addr, p.proto, p.port, p.groups)
	if rule != naive || allow != naiveAllow {
		t.Fatalf("packet %+v (peer %s)\ntable: rule %d, allow %t\nscan:  rule %d, allow %t\nrules %+v", p, address(p.addr), rule, allow, naive, naiveAllow, rules.List)
	}
	if model := rules.Match(address(p.addr), p.proto, p.port, p.groups); rule != model {
		t.Fatalf("packet %+v (peer %s)\ntable: rule %d\nmodel: rule %d\nrules %+v", p, address(p.addr), rule, model, rules.List)
	}
}

func compile(t testing.TB, rules policy.Rules) *classifier.Table {
	t.Helper()
	table, err := classifier.Compile(rules, 1, groupNumbers)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// TestDifferential compares the tables with a scan over expanded rules and with
// the reference model, for random rule sets of every size class.
func TestDifferential(t *testing.T) {
	verdicts := 0
	r := newRand(1)
	for _, n := range []int{0, 1, 2, 3, 5, 16, 63, 64, 65, 128, 200, 256, 257, 500, 1024} {
		for _, group := range []bool{false, true} {
			rules := randomRules(r, n, group)
			table, entries := compile(t, rules), expand(rules)
			for range 2000 {
				compare(t, rules, table, entries, randomPacket(r))
				verdicts++
			}
			edges := edgePackets(r, rules)
			for range min(len(edges), 2000) {
				compare(t, rules, table, entries, edges[r.IntN(len(edges))])
				verdicts++
			}
		}
	}
	t.Logf("%d verdicts", verdicts)
}

// A full table: 1,024 rules with an address and a port of their own each.
func TestFull(t *testing.T) {
	rules := distinctRules(policy.MaxRules)
	table, entries := compile(t, rules), expand(rules)
	if table.Class != classifier.Large {
		t.Errorf("class: got %s, want large", table.Class)
	}
	for i := range rules.List {
		p := packet{addr: number(rules.List[i].CIDRs[0].Addr()), proto: 6, port: rules.List[i].Ports[0].From}
		if rule, _ := table.Lookup(p.addr, policy.PortKey(p.proto, p.port), nil); rule != i {
			t.Fatalf("packet of rule %d: got rule %d", i, rule)
		}
		p.port++
		compare(t, rules, table, entries, p)
	}
}

// distinctRules makes n rules that have neither peer nor port in common.
func distinctRules(n int) policy.Rules {
	a := &policy.NetworkACL{Header: policy.Header{Kind: policy.KindNetworkACL, Metadata: policy.Metadata{Name: "full"}}}
	for i := range n {
		c, _ := address(0x0A000000 + uint32(4*i)).Prefix(32)
		a.Spec.Ingress = append(a.Spec.Ingress, policy.ACLRule{
			Priority: uint16(i + 1), Action: policy.Allow, Protocol: policy.TCP, CIDR: c,
			Ports: []policy.PortRange{{From: uint16(2*i + 1), To: uint16(2*i + 1)}},
		})
	}
	return a.Rules(policy.Ingress)
}

func TestClasses(t *testing.T) {
	for _, c := range []struct {
		rules int
		want  classifier.Class
	}{{0, classifier.Small}, {63, classifier.Small}, {65, classifier.Medium}, {255, classifier.Medium}, {257, classifier.Large}, {1024, classifier.Large}} {
		if got := compile(t, distinctRules(c.rules)).Class; got != c.want {
			t.Errorf("%d rules: got class %s, want %s", c.rules, got, c.want)
		}
	}
}

// The sizes are part of the contract with the C side, and of the documents.
func TestLayout(t *testing.T) {
	for _, c := range []struct {
		class  classifier.Class
		bytes  int
		kernel int
	}{{classifier.Small, 6920, 8192}, {classifier.Medium, 53600, 57344}, {classifier.Large, 632000, 634880}} {
		l := c.class.Layout()
		if l.Bytes != c.bytes || c.class.KernelBytes() != c.kernel {
			t.Errorf("%s: got %d bytes, %d in the kernel, want %d and %d", c.class, l.Bytes, c.class.KernelBytes(), c.bytes, c.kernel)
		}
		for _, off := range []int{l.Allow, l.AddrStart, l.PortStart, l.AddrSet, l.PortSet, l.AddrBits, l.PortBits, l.RefGroup, l.RefBits, l.Hits} {
			if off%8 != 0 {
				t.Errorf("%s: a part begins at %d, want a multiple of 8: %+v", c.class, off, l)
			}
		}
		d := c.class.Dimensions()
		for _, n := range []int{d.Intervals, d.References} {
			if bits.OnesCount(uint(n)) != 1 || bits.TrailingZeros(uint(n))%2 != 0 {
				t.Errorf("%s: %+v: the search needs powers of four", c.class, d)
			}
		}
	}
	if d := classifier.Large.Dimensions(); !d.Fits(policy.Size{Rules: policy.MaxRules, AddressBounds: policy.MaxAddressBounds, AddressSets: policy.MaxAddressSets, PortBounds: policy.MaxPortBounds, PortSets: policy.MaxPortSets, References: policy.MaxReferences}) {
		t.Errorf("%+v: the largest class does not hold what spec/policy allows", d)
	}
}

func TestOverLimit(t *testing.T) {
	rules := distinctRules(policy.MaxRules + 1)
	_, err := classifier.Compile(rules, 7, nil)
	var over *classifier.CapacityError
	if !errors.As(err, &over) || !slices.Equal(over.Over, []string{"has 1025 rules, at most 1024 fit"}) {
		t.Fatalf("got %v", err)
	}
	closed := classifier.Closed(rules, 7)
	for range 100 {
		p := randomPacket(newRand(1))
		if rule, allow := closed.Lookup(p.addr, policy.PortKey(p.proto, p.port), []uint32{1, 2}); rule != classifier.NoRule || allow {
			t.Errorf("closed: got rule %d, allow %t", rule, allow)
		}
	}
	h, err := classifier.ParseHeader(closed.Bytes)
	if err != nil || h.Flags != classifier.FlagClosed|classifier.FlagRestricts || h.Policy != 7 {
		t.Errorf("header: got %+v, %v", h, err)
	}
}

func TestHeader(t *testing.T) {
	rules := randomRules(newRand(3), 20, true)
	rules.Direction = policy.Egress
	table := compile(t, rules)
	classifier.SetGeneration(table.Bytes, 9)
	got, err := classifier.ParseHeader(table.Bytes)
	want := classifier.Header{Flags: classifier.FlagRestricts | classifier.FlagGroup | classifier.FlagEgress, Policy: 1, Generation: 9, Rules: 20}
	if err != nil || got != want {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
	for name, bad := range map[string][]byte{"short": table.Bytes[:20], "foreign": make([]byte, 100)} {
		if h, err := classifier.ParseHeader(bad); err == nil {
			t.Errorf("%s: got %+v, want an error", name, h)
		}
	}
}

// A group without a number must not be left out of a table without a word.
func TestMissingNumber(t *testing.T) {
	rules := policy.Rules{List: []policy.Rule{{Allow: true, Protocol: policy.AnyProtocol, Groups: []string{"x"}, Path: "spec.ingress[0]"}}}
	for _, numbers := range []classifier.GroupNumbers{nil, {"x": 0}, {"x": 0xFFFFFFFF}} {
		if table, err := classifier.Compile(rules, 1, numbers); err == nil {
			t.Errorf("numbers %v: got a table of class %s", numbers, table.Class)
		}
	}
}

// bytesSource feeds random choices from a fuzzer's bytes; it ends in zeros.
type bytesSource struct{ data []byte }

func (s *bytesSource) IntN(n int) int {
	v := 0
	for i := range 2 {
		if len(s.data) > 0 {
			v |= int(s.data[0]) << (8 * i)
			s.data = s.data[1:]
		}
	}
	return v % n
}

func FuzzTable(f *testing.F) {
	f.Add(uint16(3), true, []byte("a rule, a peer, a port, a packet"))
	f.Add(uint16(70), false, []byte{0, 1, 2, 3, 250, 251, 252})
	f.Fuzz(func(t *testing.T, n uint16, group bool, data []byte) {
		s := &bytesSource{data}
		rules := randomRules(s, int(n%300), group)
		table, err := classifier.Compile(rules, 1, groupNumbers)
		if err != nil {
			t.Fatal(err)
		}
		entries := expand(rules)
		for range 20 {
			compare(t, rules, table, entries, randomPacket(s))
		}
		for i, p := range edgePackets(s, rules) {
			if i < 50 {
				compare(t, rules, table, entries, p)
			}
		}
	})
}

func BenchmarkLookup(b *testing.B) {
	for _, n := range []int{16, 128, 1024} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			table := compile(b, distinctRules(n))
			last := packet{addr: 0x0A000000 + uint32(4*(n-1)), port: uint16(2*n - 1)}
			for b.Loop() {
				if rule, _ := table.Lookup(last.addr, policy.PortKey(6, last.port), nil); rule != n-1 {
					b.Fatalf("got rule %d", rule)
				}
			}
		})
	}
}

func BenchmarkCompile(b *testing.B) {
	for _, n := range []int{16, 128, 1024} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			rules := distinctRules(n)
			for b.Loop() {
				compile(b, rules)
			}
			b.ReportMetric(float64(compile(b, rules).Class.KernelBytes()), "table-bytes")
		})
	}
}
