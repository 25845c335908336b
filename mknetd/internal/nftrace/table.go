package nftrace

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Bounds of what is marked, for each direction and each way to come in. A packet has some
// 30 messages, so that a busy flow could fill any buffer.
const (
	MarkRate  = 20 // packets a second
	MarkBurst = 40 // packets
)

// Filter names a flow, both directions of it, by the addresses that packets have
// before the first or after the last translation at the hook where they come in.
type Filter struct {
	From, To netip.Addr // IPv4
	Protocol uint8
	Port     uint16 // of To; 0: any, or none
}

// Attributes and values of linux/netfilter/nf_tables.h that x/sys has no names for.
const (
	tableOwner = 0x2 // NFT_TABLE_F_OWNER

	chainTable, chainName, chainHook, chainPolicy, chainType           = 1, 3, 4, 5, 7
	hookNumber, hookPriority                                           = 1, 2
	ruleTable, ruleChain, ruleExpressions                              = 1, 2, 4
	listElement, exprName, exprData, dataValue                         = 1, 1, 2, 1
	payloadRegister, payloadBase, payloadOffset, payloadLen            = 1, 2, 3, 4
	cmpRegister, cmpOp, cmpData                                        = 1, 2, 3
	metaTo, metaKey, metaFrom                                          = 1, 2, 3
	ctTo, ctKey                                                        = 1, 2
	bitwiseFrom, bitwiseTo, bitwiseLen, bitwiseMask, bitwiseXor        = 1, 2, 3, 4, 5
	limitRate, limitUnit, limitBurst, limitType                        = 1, 2, 3, 4
	immediateTo, immediateData                                         = 1, 2
	counterPackets                                                     = 2
	sourceOffset, destinationOffset                                    = 12, 16         // in the IPv4 header, RFC 791
	sourcePortOffset, destinationPortOffset                            = 0, 2           // of TCP, UDP, SCTP
	inetPrerouting, inetOutput                                  uint32 = 0, 3           // NF_INET_... of linux/netfilter.h
	original, reply                                             uint8  = 0, 1           // IP_CT_DIR_...
	statusSource, statusDestination                             uint32 = 1 << 4, 1 << 5 // IPS_SRC_NAT, IPS_DST_NAT
	accept                                                      uint32 = 1
)

// spot is where packets are looked at.
type spot struct {
	chain    string
	hook     uint32
	priority int32
	// translated are spots behind the translation of destinations (NF_IP_PRI_NAT_DST
	// is -100): there only packets count whose addresses it has just changed, for
	// instance the answers of a masqueraded flow.
	translated bool
}

// Before raw (-300), and behind the reassembly of fragments (-400).
var spots = []spot{
	{"arrival", inetPrerouting, -301, false},
	{"arrival-translated", inetPrerouting, -99, true},
	{"departure", inetOutput, -301, false},
	{"departure-translated", inetOutput, -99, true},
}

// translation is what makes a spot's destination change: the answer to a flow whose
// source was translated, and the way there of one whose destination was.
type translation struct {
	direction uint8
	status    uint32
}

var translations = []translation{{reply, statusSource}, {original, statusDestination}}

// batch is the table as one transaction of nf_tables. Its last message but one is
// acknowledged.
func batch(table string, f Filter) ([]netlink.Message, error) {
	if !f.From.Is4() || !f.To.Is4() {
		return nil, fmt.Errorf("from %q to %q: must be IPv4 addresses", f.From, f.To)
	}
	b := &builder{}
	b.control(unix.NFNL_MSG_BATCH_BEGIN)
	b.add(unix.NFT_MSG_NEWTABLE, netlink.Create|netlink.Excl, func(e *netlink.AttributeEncoder) {
		e.String(unix.NFTA_TABLE_NAME, table)
		e.Uint32(unix.NFTA_TABLE_FLAGS, tableOwner)
	})
	for _, s := range spots {
		b.add(unix.NFT_MSG_NEWCHAIN, netlink.Create|netlink.Excl, func(e *netlink.AttributeEncoder) {
			e.String(chainTable, table)
			e.String(chainName, s.chain)
			nested(e, chainHook, func(e *netlink.AttributeEncoder) {
				e.Uint32(hookNumber, s.hook)
				e.Int32(hookPriority, s.priority)
			})
			e.Uint32(chainPolicy, accept)
			e.String(chainType, "filter")
		})
	}
	for _, s := range spots {
		when := []translation{{}}
		if s.translated {
			when = translations
		}
		for _, w := range when {
			for _, back := range []bool{false, true} {
				b.add(unix.NFT_MSG_NEWRULE, netlink.Create|netlink.Append, func(e *netlink.AttributeEncoder) {
					e.String(ruleTable, table)
					e.String(ruleChain, s.chain)
					nested(e, ruleExpressions, func(e *netlink.AttributeEncoder) {
						f.match(e, back)
						if s.translated {
							w.match(e)
						}
						mark(e)
					})
				})
			}
		}
	}
	b.messages[len(b.messages)-1].Header.Flags |= netlink.Acknowledge
	b.control(unix.NFNL_MSG_BATCH_END)
	return b.messages, b.err
}

// match are the expressions that let only packets of the flow past.
func (f Filter) match(e *netlink.AttributeEncoder, back bool) {
	source, destination, portAt := f.From, f.To, uint32(destinationPortOffset)
	if back {
		source, destination, portAt = f.To, f.From, sourcePortOffset
	}
	expression(e, "meta", func(e *netlink.AttributeEncoder) {
		e.Uint32(metaTo, unix.NFT_REG_1)
		e.Uint32(metaKey, unix.NFT_META_L4PROTO)
	})
	compare(e, unix.NFT_CMP_EQ, []byte{f.Protocol})
	payload(e, unix.NFT_PAYLOAD_NETWORK_HEADER, sourceOffset, 4)
	compare(e, unix.NFT_CMP_EQ, source.AsSlice())
	payload(e, unix.NFT_PAYLOAD_NETWORK_HEADER, destinationOffset, 4)
	compare(e, unix.NFT_CMP_EQ, destination.AsSlice())
	if f.Port != 0 {
		payload(e, unix.NFT_PAYLOAD_TRANSPORT_HEADER, portAt, 2)
		compare(e, unix.NFT_CMP_EQ, binary.BigEndian.AppendUint16(nil, f.Port))
	}
}

// match are the expressions that let only packets past that were translated this way.
func (t translation) match(e *netlink.AttributeEncoder) {
	expression(e, "ct", func(e *netlink.AttributeEncoder) {
		e.Uint32(ctTo, unix.NFT_REG_1)
		e.Uint32(ctKey, unix.NFT_CT_DIRECTION)
	})
	compare(e, unix.NFT_CMP_EQ, []byte{t.direction})
	expression(e, "ct", func(e *netlink.AttributeEncoder) {
		e.Uint32(ctTo, unix.NFT_REG_1)
		e.Uint32(ctKey, unix.NFT_CT_STATUS)
	})
	none := make([]byte, 4)
	expression(e, "bitwise", func(e *netlink.AttributeEncoder) {
		e.Uint32(bitwiseFrom, unix.NFT_REG_1)
		e.Uint32(bitwiseTo, unix.NFT_REG_1)
		e.Uint32(bitwiseLen, 4)
		value(e, bitwiseMask, binary.NativeEndian.AppendUint32(nil, t.status))
		value(e, bitwiseXor, none)
	})
	compare(e, unix.NFT_CMP_NEQ, none)
}

// mark counts what has come so far, and traces as much of it as is allowed. What was
// marked is counted as well.
func mark(e *netlink.AttributeEncoder) {
	counter := func(e *netlink.AttributeEncoder) { e.Uint64(counterPackets, 0) }
	expression(e, "counter", counter)
	expression(e, "limit", func(e *netlink.AttributeEncoder) {
		e.Uint64(limitRate, MarkRate)
		e.Uint64(limitUnit, 1) // second
		e.Uint32(limitBurst, MarkBurst)
		e.Uint32(limitType, unix.NFT_LIMIT_PKTS)
	})
	expression(e, "counter", counter)
	expression(e, "immediate", func(e *netlink.AttributeEncoder) {
		e.Uint32(immediateTo, unix.NFT_REG_1)
		value(e, immediateData, []byte{1})
	})
	expression(e, "meta", func(e *netlink.AttributeEncoder) {
		e.Uint32(metaKey, unix.NFT_META_NFTRACE)
		e.Uint32(metaFrom, unix.NFT_REG_1)
	})
}

func payload(e *netlink.AttributeEncoder, base, offset, bytes uint32) {
	expression(e, "payload", func(e *netlink.AttributeEncoder) {
		e.Uint32(payloadRegister, unix.NFT_REG_1)
		e.Uint32(payloadBase, base)
		e.Uint32(payloadOffset, offset)
		e.Uint32(payloadLen, bytes)
	})
}

func compare(e *netlink.AttributeEncoder, op uint32, with []byte) {
	expression(e, "cmp", func(e *netlink.AttributeEncoder) {
		e.Uint32(cmpRegister, unix.NFT_REG_1)
		e.Uint32(cmpOp, op)
		value(e, cmpData, with)
	})
}

func expression(e *netlink.AttributeEncoder, name string, data func(*netlink.AttributeEncoder)) {
	nested(e, listElement, func(e *netlink.AttributeEncoder) {
		e.String(exprName, name)
		nested(e, exprData, data)
	})
}

func value(e *netlink.AttributeEncoder, attribute uint16, b []byte) {
	nested(e, attribute, func(e *netlink.AttributeEncoder) { e.Bytes(dataValue, b) })
}

func nested(e *netlink.AttributeEncoder, attribute uint16, fill func(*netlink.AttributeEncoder)) {
	e.Nested(attribute, func(e *netlink.AttributeEncoder) error {
		fill(e)
		return nil
	})
}

// builder collects the messages of one batch.
type builder struct {
	messages []netlink.Message
	err      error
}

// add adds a message of the family IPv4.
func (b *builder) add(message uint16, flags netlink.HeaderFlags, fill func(*netlink.AttributeEncoder)) {
	m, err := request(message, flags, fill)
	if err != nil && b.err == nil {
		b.err = err
	}
	b.messages = append(b.messages, m)
}

// control adds the begin or the end of a batch: the subsystem is in its header's
// resource (linux/netfilter/nfnetlink.h).
func (b *builder) control(message uint16) {
	b.messages = append(b.messages, netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(message), Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES},
	})
}

func request(message uint16, flags netlink.HeaderFlags, fill func(*netlink.AttributeEncoder)) (netlink.Message, error) {
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	fill(e)
	body, err := e.Encode()
	return netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | netlink.HeaderType(message), Flags: netlink.Request | flags},
		Data:   append([]byte{unix.AF_INET, unix.NFNETLINK_V0, 0, 0}, body...),
	}, err
}
