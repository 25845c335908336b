// Package conntrack removes and counts the connection tracking entries of an
// endpoint's address. An entry that outlives its endpoint would translate the
// packets of the address's next owner (CNI plugins issue 123).
//
// It works on the network namespace of the calling thread and changes nothing
// but entries of the addresses it is given.
package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/ti-mo/conntrack"
	"github.com/ti-mo/netfilter"
	"golang.org/x/sys/unix"
)

// queryTimeout bounds one request: a kernel-side delete walked 250,000 entries
// in 65 ms, a dump took 1.7 s (measured).
const queryTimeout = 10 * time.Second

// Entry is one tracked connection. ICMP has its identifier in place of ports.
type Entry struct {
	Protocol                    uint8          // IANA protocol number
	OrigSource, OrigDestination netip.AddrPort // as the first packet had it
	ReplSource, ReplDestination netip.AddrPort // as its answer has it; differs where NAT is at work
	Answered                    bool           // packets have gone both ways
}

// Of returns the entry of the packet from a to b, of a flow that began in this
// direction or in the other one; then it is a reply.
func Of(entries []Entry, protocol uint8, a, b netip.AddrPort) (e Entry, reply, ok bool) {
	for _, e := range entries {
		switch {
		case e.Protocol != protocol:
		case e.OrigSource == a && e.OrigDestination == b:
			return e, false, true
		case e.ReplSource == a && e.OrigSource == b:
			return e, true, true
		}
	}
	return Entry{}, false, false
}

// about reports whether the entry belongs to the address: it began the flow, or
// it is the one that answers.
func (e Entry) about(a netip.Addr) bool {
	return e.OrigSource.Addr() == a || e.ReplSource.Addr() == a
}

// Flush deletes every entry whose original source or reply source is one of the
// addresses, IPv4 or IPv6. Entries of others stay; no entry is success. The kernel
// filters where it can (CTA_FILTER for a delete, kernel commit 1ef7f50ccc6e);
// elsewhere the table is dumped once for all addresses.
func Flush(ctx context.Context, addrs ...netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	for _, a := range addrs {
		if !a.IsValid() || a.IsUnspecified() {
			return fmt.Errorf("flush conntrack entries of %q: not the address of an endpoint", a)
		}
	}
	c, err := dial(ctx)
	if err != nil {
		return fmt.Errorf("flush conntrack entries: %w", err)
	}
	defer c.Close()
	for i, a := range addrs {
		for _, side := range []uint16{ctaTupleOrig, ctaTupleReply} {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("flush conntrack entries of %s: %w", a, err)
			}
			err := c.deleteBySource(a.Unmap(), side)
			switch {
			case err == nil || errors.Is(err, unix.ENOENT):
			case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL):
				return flushByDump(ctx, addrs[i:])
			default:
				return fmt.Errorf("flush conntrack entries of %s: %w", a, err)
			}
		}
	}
	return nil
}

// List returns the entries that Flush would delete for one address. It reads the
// whole table: for an operator's eyes, not for the way of an ADD.
func List(ctx context.Context, a netip.Addr) ([]Entry, error) {
	flows, err := dump(ctx)
	if err != nil {
		return nil, fmt.Errorf("list conntrack entries of %s: %w", a, err)
	}
	var entries []Entry
	for _, f := range flows {
		if e := entryOf(f); e.about(a.Unmap()) {
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// Count is the number of entries that List returns.
func Count(ctx context.Context, a netip.Addr) (int, error) {
	entries, err := List(ctx, a)
	return len(entries), err
}

func entryOf(f conntrack.Flow) Entry {
	o, r := f.TupleOrig, f.TupleReply
	for _, p := range []*conntrack.ProtoTuple{&o.Proto, &r.Proto} {
		if p.ICMPv4 || p.ICMPv6 {
			p.SourcePort, p.DestinationPort = p.ICMPID, p.ICMPID
		}
	}
	return Entry{
		Answered:        f.Status.SeenReply(),
		Protocol:        o.Proto.Protocol,
		OrigSource:      netip.AddrPortFrom(o.IP.SourceAddress, o.Proto.SourcePort),
		OrigDestination: netip.AddrPortFrom(o.IP.DestinationAddress, o.Proto.DestinationPort),
		ReplSource:      netip.AddrPortFrom(r.IP.SourceAddress, r.Proto.SourcePort),
		ReplDestination: netip.AddrPortFrom(r.IP.DestinationAddress, r.Proto.DestinationPort),
	}
}

func dump(ctx context.Context) ([]conntrack.Flow, error) {
	c, err := conntrack.Dial(nil)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	// Closing the socket is the only way to end a dump of this library early.
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	flows, err := c.Dump(nil)
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	return flows, err
}

// flushByDump is Flush for kernels without CTA_FILTER.
func flushByDump(ctx context.Context, addrs []netip.Addr) error {
	flows, err := dump(ctx)
	if err != nil {
		return fmt.Errorf("flush conntrack entries by hand: %w", err)
	}
	wanted := map[netip.Addr]bool{}
	for _, a := range addrs {
		wanted[a.Unmap()] = true
	}
	c, err := conntrack.Dial(nil)
	if err != nil {
		return fmt.Errorf("flush conntrack entries by hand: %w", err)
	}
	defer c.Close()
	for _, f := range flows {
		if !wanted[f.TupleOrig.IP.SourceAddress] && !wanted[f.TupleReply.IP.SourceAddress] {
			continue
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("flush conntrack entries by hand: %w", err)
		}
		// Absent is success: an entry may end by itself meanwhile.
		if err := c.Delete(f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete conntrack entry %s: %w", f.TupleOrig, err)
		}
	}
	return nil
}

// conn is one netlink socket with a deadline.
type conn struct{ *netfilter.Conn }

func dial(ctx context.Context) (*conn, error) {
	c, err := netfilter.Dial(nil)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(queryTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := c.SetDeadline(deadline); err != nil {
		_ = c.Close()
		return nil, err
	}
	return &conn{c}, nil
}

// deleteBySource asks the kernel to delete all entries that have the address as
// the source of one direction.
func (c *conn) deleteBySource(a netip.Addr, side uint16) error {
	msg, err := filtered(a, side)
	if err != nil {
		return err
	}
	_, err = c.Query(msg)
	return err
}

// Numbers of linux/netfilter/nfnetlink_conntrack.h (6.18) and, for filterIPSource,
// of net/netfilter/nf_internals.h.
const (
	msgDelete = 2 // IPCTNL_MSG_CT_DELETE

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaTupleIP    = 1
	ctaIPv4Source = 1
	ctaIPv6Source = 3

	ctaFilter           = 25
	ctaFilterOrigFlags  = 1
	ctaFilterReplyFlags = 2
	filterIPSource      = 1 << 0 // CTA_FILTER_F_CTA_IP_SRC
)

// filtered is the delete request for one address and direction. Both flag words
// must be present; a zero one filters nothing.
func filtered(a netip.Addr, side uint16) (netlink.Message, error) {
	family, attribute := netfilter.ProtoIPv4, uint16(ctaIPv4Source)
	if a.Is6() {
		family, attribute = netfilter.ProtoIPv6, ctaIPv6Source
	}
	orig, reply := uint32(filterIPSource), uint32(0)
	if side == ctaTupleReply {
		orig, reply = reply, orig
	}
	return netfilter.MarshalNetlink(
		netfilter.Header{
			SubsystemID: netfilter.NFSubsysCTNetlink,
			MessageType: msgDelete,
			Family:      family,
			Flags:       netlink.Request | netlink.Acknowledge,
			// Version 0 ignores the family (kernel commit e7600865db32). A kernel
			// without the filter wants the whole tuple of one entry and answers
			// EINVAL; because a tuple is there it never takes this for "all".
			Version: 1,
		},
		[]netfilter.Attribute{
			{Type: side, Nested: true, Children: []netfilter.Attribute{
				{Type: ctaTupleIP, Nested: true, Children: []netfilter.Attribute{
					{Type: attribute, Data: a.AsSlice()},
				}},
			}},
			{Type: ctaFilter, Nested: true, Children: []netfilter.Attribute{
				// Native byte order: the kernel reads them with nla_get_u32.
				{Type: ctaFilterOrigFlags, Data: native(orig)},
				{Type: ctaFilterReplyFlags, Data: native(reply)},
			}},
		})
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
