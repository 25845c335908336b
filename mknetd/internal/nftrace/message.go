package nftrace

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// kind is what a message is about, NFT_TRACETYPE_... of linux/netfilter/nf_tables.h.
type kind uint32

const (
	byPolicy kind = unix.NFT_TRACETYPE_POLICY // a packet has come to the end of a base chain
	byReturn kind = unix.NFT_TRACETYPE_RETURN // a rule returns, or without a handle: the end of another chain
	byRule   kind = unix.NFT_TRACETYPE_RULE   // a rule has matched, or without a handle: none of a chain has
)

// message is NFT_MSG_TRACE.
type message struct {
	family       uint8 // NFPROTO_... of linux/netfilter.h
	id           uint32
	kind         kind
	table, chain string
	handle       uint64 // of the rule
	verdict      int32  // NF_... or NFT_...; of a policy too
	target       string // chain of a jump or goto
	// With the first message of a packet in a base chain, else nil: the first bytes
	// of its headers, as long as they are in the packet.
	network, transport []byte
}

// matched reports whether the message is of a rule (nf_trace_fill_rule_info).
func (m message) matched() bool { return m.kind != byPolicy && m.handle != 0 }

// Bounds of one message: names as NFT_NAME_MAXLEN, headers as NFT_TRACETYPE_..._HSIZE.
const (
	maxName      = 256
	maxNetwork   = 40
	maxTransport = 20
)

var errNotTrace = errors.New("is not a message of a trace")

// parse reads one message. What it returns shares no memory with it.
func parse(m netlink.Message) (message, error) {
	if m.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE {
		return message{}, errNotTrace
	}
	if len(m.Data) < 4 { // struct nfgenmsg
		return message{}, fmt.Errorf("%d bytes: no header", len(m.Data))
	}
	out := message{family: m.Data[0]}
	d, err := netlink.NewAttributeDecoder(m.Data[4:])
	if err != nil {
		return message{}, err
	}
	d.ByteOrder = binary.BigEndian
	policy := int32(0)
	for d.Next() {
		switch d.Type() {
		case unix.NFTA_TRACE_TABLE:
			out.table = name(d)
		case unix.NFTA_TRACE_CHAIN:
			out.chain = name(d)
		case unix.NFTA_TRACE_RULE_HANDLE:
			out.handle = d.Uint64()
		case unix.NFTA_TRACE_TYPE:
			out.kind = kind(d.Uint32())
		case unix.NFTA_TRACE_VERDICT:
			d.Nested(func(d *netlink.AttributeDecoder) error {
				for d.Next() {
					switch d.Type() {
					case verdictCode:
						out.verdict = d.Int32()
					case verdictChain:
						out.target = name(d)
					}
				}
				return nil
			})
		case unix.NFTA_TRACE_ID:
			out.id = d.Uint32()
		case unix.NFTA_TRACE_POLICY:
			policy = d.Int32()
		case unix.NFTA_TRACE_NETWORK_HEADER:
			out.network = header(d, maxNetwork)
		case unix.NFTA_TRACE_TRANSPORT_HEADER:
			out.transport = header(d, maxTransport)
		}
	}
	if err := d.Err(); err != nil {
		return message{}, err
	}
	switch {
	case out.kind < byPolicy || out.kind > byRule:
		return message{}, fmt.Errorf("type %d is not known", out.kind)
	case out.table == "" || out.chain == "" || len(out.table) > maxName || len(out.chain) > maxName || len(out.target) > maxName:
		return message{}, errors.New("no table or chain, or a name too long")
	case out.kind == byPolicy:
		out.verdict, out.handle = policy, 0
	}
	return out, nil
}

const verdictCode, verdictChain = 1, 2 // NFTA_VERDICT_...

func name(d *netlink.AttributeDecoder) string { return unix.ByteSliceToString(d.Bytes()) }

// header copies at most so many bytes.
func header(d *netlink.AttributeDecoder, most int) []byte {
	b := d.Bytes()
	return b[:min(len(b), most)]
}

// verdictName is what a verdict is called by nft(8).
func verdictName(code int32, target string) string {
	switch code {
	case unix.NFT_CONTINUE:
		return "continue"
	case unix.NFT_JUMP:
		return "jump " + target
	case unix.NFT_GOTO:
		return "goto " + target
	case unix.NFT_RETURN:
		return "return"
	}
	switch code & 0xff { // NF_VERDICT_MASK; the rest is a queue's number or an errno
	case 0:
		return "drop"
	case 1:
		return "accept"
	case 2:
		return "stolen"
	case 3:
		return "queue"
	}
	return fmt.Sprintf("verdict %d", code)
}
