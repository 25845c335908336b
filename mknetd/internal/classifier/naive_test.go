package classifier_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// entry is one protocol, one port range and one peer: the flat form into which a
// rule would have to be expanded for a scan. It is the third opinion beside the
// tables and the model, and shares no code with either.
type entry struct {
	rule       int
	allow      bool
	addr, mask uint32
	group      string // instead of addr and mask
	proto      uint16
	lo, hi     uint16
}

func expand(rules policy.Rules) []entry {
	var out []entry
	for i, r := range rules.List {
		ports := r.Ports
		if len(ports) == 0 {
			ports = []policy.PortRange{{From: 0, To: 65535}}
		}
		for _, p := range ports {
			e := entry{rule: i, allow: r.Allow, proto: uint16(r.Protocol), lo: p.From, hi: p.To}
			for _, c := range r.CIDRs {
				e.addr, e.mask = number(c.Addr()), uint32(0xFFFFFFFF<<(32-c.Bits()))
				out = append(out, e)
			}
			for _, g := range r.Groups {
				e.group = g
				out = append(out, e)
			}
		}
	}
	return out
}

func scan(entries []entry, addr uint32, proto uint8, port uint16, groups []string) (int, bool) {
	for _, e := range entries {
		if e.proto != 0xFFFF && e.proto != uint16(proto) || port < e.lo || port > e.hi {
			continue
		}
		if e.group != "" && slices.Contains(groups, e.group) || e.group == "" && addr&e.mask == e.addr {
			return e.rule, e.allow
		}
	}
	return classifier.NoRule, false
}

func number(a netip.Addr) uint32 { b := a.As4(); return binary.BigEndian.Uint32(b[:]) }

func address(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// source is where random rules and packets come from: math/rand or a fuzzer.
type source interface{ IntN(n int) int }

// groupNames are the groups that random rules name.
var groupNames = func() []string {
	out := make([]string, 40)
	for i := range out {
		out[i] = string(rune('a'+i/26)) + string(rune('a'+i%26))
	}
	return out
}()

var groupNumbers = func() classifier.GroupNumbers {
	m := classifier.GroupNumbers{}
	for i, n := range groupNames {
		m[n] = uint32(i*i*7919 + 1)
	}
	m[groupNames[len(groupNames)-1]] = 0xFFFFFFFE
	return m
}()

// randomRules makes n rules. Addresses and ports come from few values, so that
// rules overlap, shadow and touch each other.
func randomRules(r source, n int, group bool) policy.Rules {
	out := policy.Rules{Direction: policy.Ingress, Policy: policy.Key{Kind: policy.KindNetworkACL, Name: "x"}, Restricts: n > 0}
	if group {
		out.Policy.Kind = policy.KindSecurityGroup
	}
	for range n {
		rule := policy.Rule{Allow: group || r.IntN(2) == 0, Protocol: randomProtocol(r)}
		if rule.Protocol.HasPorts() {
			for range r.IntN(4) {
				from := randomPort(r)
				rule.Ports = append(rule.Ports, policy.PortRange{From: max(from, 1), To: uint16(min(65535, int(max(from, 1))+r.IntN(3)*r.IntN(2000)))})
			}
		}
		peers := 1
		if group {
			peers = r.IntN(4)
		}
		for range peers {
			if group && r.IntN(3) == 0 {
				rule.Groups = append(rule.Groups, groupNames[r.IntN(len(groupNames))])
				continue
			}
			p, _ := address(randomAddress(r)).Prefix([]int{0, 8, 12, 16, 20, 24, 28, 31, 32, 32, 32}[r.IntN(11)])
			rule.CIDRs = append(rule.CIDRs, p)
		}
		if len(rule.CIDRs)+len(rule.Groups) == 0 {
			rule.CIDRs = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
		}
		out.List = append(out.List, rule)
	}
	return out
}

func randomProtocol(r source) policy.Protocol {
	return []policy.Protocol{policy.AnyProtocol, 0, 1, policy.TCP, policy.TCP, policy.TCP, policy.UDP, policy.SCTP, 47, 255}[r.IntN(10)]
}

func randomPort(r source) uint16 {
	if r.IntN(3) == 0 {
		return []uint16{0, 1, 2, 80, 443, 65534, 65535}[r.IntN(7)]
	}
	return uint16(r.IntN(4096) * 16)
}

func randomAddress(r source) uint32 {
	switch r.IntN(8) {
	case 0:
		return []uint32{0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF}[r.IntN(6)]
	case 1:
		return uint32(r.IntN(1 << 30))
	}
	return 0x0A000000 + uint32(r.IntN(1<<12))
}

// packet is what is looked up.
type packet struct {
	addr   uint32
	proto  uint8
	port   uint16
	groups []string
}

func randomPacket(r source) packet {
	p := packet{addr: randomAddress(r)}
	if proto := randomProtocol(r); proto != policy.AnyProtocol {
		p.proto = uint8(proto)
	} else {
		p.proto = uint8(r.IntN(256))
	}
	if policy.Protocol(p.proto).HasPorts() {
		p.port = randomPort(r) + uint16(r.IntN(3))
	}
	for range r.IntN(3) * r.IntN(9) {
		if g := groupNames[r.IntN(len(groupNames))]; !slices.Contains(p.groups, g) {
			p.groups = append(p.groups, g)
		}
	}
	return p
}

// edgePackets are those on both sides of every boundary of a rule.
func edgePackets(r source, rules policy.Rules) []packet {
	var out []packet
	for _, rule := range rules.List {
		p := randomPacket(r)
		if rule.Protocol != policy.AnyProtocol {
			p.proto = uint8(rule.Protocol)
		}
		for _, c := range rule.CIDRs {
			first := number(c.Addr())
			last := first | uint32(uint64(1)<<(32-c.Bits())-1)
			for _, addr := range []uint32{first - 1, first, last, last + 1} {
				p.addr = addr
				out = append(out, p)
			}
		}
		for _, ports := range rule.Ports {
			for _, port := range []uint16{ports.From - 1, ports.From, ports.To, ports.To + 1} {
				p.port = port
				out = append(out, p)
			}
		}
	}
	return out
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 7)) }
