package nftrace

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

var child, world = netip.MustParseAddr("172.30.0.2"), netip.MustParseAddr("198.51.100.1")

// encode writes a message as the kernel does (nf_tables_trace.c, nft_trace_notify).
func encode(t testing.TB, m message) netlink.Message {
	t.Helper()
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	e.Uint32(unix.NFTA_TRACE_ID, m.id)
	e.Uint32(unix.NFTA_TRACE_TYPE, uint32(m.kind))
	e.String(unix.NFTA_TRACE_TABLE, m.table)
	e.String(unix.NFTA_TRACE_CHAIN, m.chain)
	switch m.kind {
	case byPolicy:
		e.Int32(unix.NFTA_TRACE_POLICY, m.verdict)
	default:
		if m.handle != 0 {
			e.Uint64(unix.NFTA_TRACE_RULE_HANDLE, m.handle)
		}
		nested(e, unix.NFTA_TRACE_VERDICT, func(e *netlink.AttributeEncoder) {
			e.Int32(verdictCode, m.verdict)
			if m.target != "" {
				e.String(verdictChain, m.target)
			}
		})
	}
	if m.network != nil {
		e.Bytes(unix.NFTA_TRACE_NETWORK_HEADER, m.network)
		e.Bytes(unix.NFTA_TRACE_TRANSPORT_HEADER, m.transport)
	}
	body, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_TRACE},
		Data:   append([]byte{m.family, 0, 0, 0}, body...),
	}
}

// headers are those of a packet of 60 bytes.
func headers(proto uint8, from, to netip.Addr, transport ...byte) (network, rest []byte) {
	h := make([]byte, 20)
	h[0], h[3], h[9] = 0x45, 60, proto
	copy(h[12:], from.AsSlice())
	copy(h[16:], to.AsSlice())
	return h, transport
}

func marked(id uint32, from, to netip.Addr) message {
	m := message{family: unix.AF_INET, id: id, kind: byRule, table: "mknet-trace-1", chain: "arrival", handle: 5, verdict: unix.NFT_CONTINUE}
	m.network, m.transport = headers(unix.IPPROTO_TCP, from, to, 0x9c, 0x40, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0)
	return m
}

func TestParse(t *testing.T) {
	t.Parallel()
	for _, want := range []message{
		marked(7, child, world),
		{family: unix.AF_INET, id: 1 << 31, kind: byPolicy, table: "filter", chain: "FORWARD", verdict: 1},
		{family: 1, id: 2, kind: byReturn, table: "fw", chain: "c", verdict: unix.NFT_CONTINUE},
		{family: unix.AF_INET, id: 3, kind: byRule, table: "filter", chain: "FORWARD", handle: 1 << 40, verdict: unix.NFT_GOTO, target: "MKNET-FWD"},
		{family: unix.AF_INET, id: 3, kind: byRule, table: "filter", chain: "MK-1", handle: 9},
	} {
		got, err := parse(encode(t, want))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v, want %+v", got, err, want)
		}
	}
	long := marked(1, child, world)
	long.network, long.transport = make([]byte, 400), make([]byte, 400)
	if got, err := parse(encode(t, long)); err != nil || len(got.network) != maxNetwork || len(got.transport) != maxTransport {
		t.Errorf("headers of %d and %d bytes, %v", len(got.network), len(got.transport), err)
	}
	other := encode(t, marked(1, child, world))
	other.Header.Type = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE
	for name, m := range map[string]netlink.Message{
		"another message":      other,
		"no header":            {Header: encode(t, marked(1, child, world)).Header, Data: []byte{2, 0}},
		"an unknown type":      encode(t, message{kind: 9, table: "a", chain: "b"}),
		"no table":             encode(t, message{kind: byRule, chain: "b"}),
		"a name without end":   encode(t, message{kind: byRule, table: "a", chain: strings.Repeat("b", 300)}),
		"a number cut off":     {Header: other.Header, Data: []byte{2, 0, 0, 0, 6, 0, 6, 0, 1, 2, 0, 0}},
		"an attribute cut off": {Header: encode(t, marked(1, child, world)).Header, Data: []byte{2, 0, 0, 0, 40, 0, 6, 0, 1}},
	} {
		if got, err := parse(m); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestVerdictName(t *testing.T) {
	t.Parallel()
	for want, code := range map[string]int32{
		"drop": 0, "accept": 1, "stolen": 2, "queue": 5<<16 | 3, "continue": unix.NFT_CONTINUE, "return": unix.NFT_RETURN,
		"jump c": unix.NFT_JUMP, "goto c": unix.NFT_GOTO, "verdict 4": 4,
	} {
		if got := verdictName(code, "c"); got != want {
			t.Errorf("%d: got %q, want %q", code, got, want)
		}
	}
	if got := verdictName(-1<<16, ""); got != "drop" { // with an errno, as a reject has it
		t.Errorf("a drop with an errno: %q", got)
	}
}

// What a trace tells of the messages that come: of its own flow only, a packet whose
// id comes again is another one, and ways into other chains are left out.
func TestFlow(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	rule := func(id uint32, chain string, handle uint64, verdict int32) message {
		return message{family: unix.AF_INET, id: id, kind: byRule, table: "filter", chain: chain, handle: handle, verdict: verdict, target: "x"}
	}
	policy := message{family: unix.AF_INET, id: 1, kind: byPolicy, table: "raw", chain: "PREROUTING", verdict: 1}
	foreign := marked(5, child, world)
	foreign.table = "mknet-trace-2"
	inet := rule(1, "fwd", 3, 0)
	inet.family, inet.table = 1, "fw"
	bridge := rule(1, "fwd", 3, 0)
	bridge.family = unix.AF_BRIDGE
	f := newFlow("mknet-trace-1", Filter{From: child, To: world, Protocol: 6, Port: 80})
	var got []string
	for _, m := range []message{
		rule(1, "FORWARD", 2, 1), // before it is marked
		marked(1, child, world),
		{family: unix.AF_INET, id: 1, kind: byPolicy, table: "mknet-trace-1", chain: "arrival", verdict: 1},
		policy,
		rule(1, "FORWARD", 2, unix.NFT_JUMP), rule(1, "FORWARD", 2, unix.NFT_GOTO),
		{family: unix.AF_INET, id: 1, kind: byReturn, table: "filter", chain: "MK-1", verdict: unix.NFT_CONTINUE},
		foreign, rule(5, "FORWARD", 2, 1), // of another trace
		marked(2, world, child),
		rule(2, "MK-1-OUT", 4, 1),
		rule(1, "MK-1", 0, unix.NFT_CONTINUE), // no rule has matched
		{family: unix.AF_INET, id: 1, kind: byRule, table: "mknet-trace-1", chain: "departure", verdict: unix.NFT_CONTINUE, network: []byte{0x45}},
		{family: unix.AF_INET, id: 1, kind: byReturn, table: "filter", chain: "MK-1", handle: 8, verdict: unix.NFT_RETURN},
		bridge, inet,
		marked(1, child, world), // its memory has a new packet
		rule(1, "MK-1", 9, 0),
	} {
		if s, ok := f.next(m, now); ok {
			way := "there"
			if s.Packet.Reply {
				way = "back"
			}
			got = append(got, strings.Join([]string{string(rune('0' + s.Packet.Number)), way, s.Family, s.Table, s.Chain, string(rune('0' + s.Handle)), s.Verdict}, " "))
			if p := s.Packet; p.Bytes != 60 || p.TCPFlags != 2 || p.SourcePort != 40000 || p.DestinationPort != 80 || !s.At.Equal(now) {
				t.Errorf("%+v", s)
			}
		}
	}
	want := []string{
		"1 there ip raw PREROUTING 0 accept", "2 back ip filter MK-1-OUT 4 accept", "1 there ip filter MK-1 8 return",
		"1 there inet fw fwd 3 drop", "3 there ip filter MK-1 9 drop",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if s, ok := f.next(rule(1, "MK-1", 9, 0), now.Add(packetLife+1)); ok {
		t.Errorf("of a packet that is long gone: %+v", s)
	}
	for id := range uint32(3 * maxPackets) {
		f.next(marked(id, child, world), now)
	}
	if len(f.packets) != maxPackets || len(f.order) != maxPackets {
		t.Errorf("%d packets and %d ids are remembered, want %d", len(f.packets), len(f.order), maxPackets)
	}
	broken := marked(1, child, world)
	broken.network = broken.network[:19]
	if _, ok := packetOf(broken, f.filter); ok {
		t.Error("half a header was read")
	}
	later := marked(1, child, world)
	later.network[7] = 1 // its offset
	if p, ok := packetOf(later, f.filter); !ok || p.DestinationPort != 0 {
		t.Errorf("a later fragment: %+v, %v", p, ok)
	}
}

// FuzzMessage reads whatever may come out of the socket.
func FuzzMessage(f *testing.F) {
	f.Add(encode(f, marked(7, child, world)).Data)
	f.Add(encode(f, message{family: 2, id: 7, kind: byRule, table: "filter", chain: "FORWARD", handle: 4, verdict: unix.NFT_JUMP, target: "MKNET-FWD"}).Data)
	f.Add(encode(f, message{family: 2, id: 7, kind: byPolicy, table: "filter", chain: "FORWARD", verdict: 1}).Data)
	f.Fuzz(func(t *testing.T, data []byte) {
		header := netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_TRACE}
		m, err := parse(netlink.Message{Header: header, Data: data})
		if err != nil {
			return
		}
		if len(m.table) > maxName || len(m.chain) > maxName || len(m.target) > maxName || len(m.network) > maxNetwork || len(m.transport) > maxTransport {
			t.Fatalf("larger than it may be: %+v", m)
		}
		fl := newFlow(m.table, Filter{From: child, To: world})
		fl.next(m, time.Unix(0, 0))
		m.table = "another"
		if s, ok := fl.next(m, time.Unix(1, 0)); ok && (s.Packet.Number != 1 || !s.Packet.Source.Is4() || s.Verdict == "") {
			t.Fatalf("%+v", s)
		}
		countersOf(netlink.Message{Data: data}, "t")
	})
}
