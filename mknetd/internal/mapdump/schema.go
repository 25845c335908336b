package mapdump

import (
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// kind is how a field is shown, and how a filter on it is read.
type kind uint8

const (
	number  kind = iota
	address      // IPv4; filter: an address or a prefix
	mac          // filter: six bytes in hexadecimal
	label        // one of labels; filter: a label or a number
	flags        // bits with labels; filter: labels, all of which are set, or a number
	digits       // hexadecimal, from the highest; filter: the first digits
	text         // up to the first NUL
	numbers      // up to the first 0; filter: one of them
	bitmap       // numbers of the bits that are set
	idle         // seconds since a time of CLOCK_MONOTONIC
)

// Part says where in an entry a field lies.
type Part uint8

// The parts.
const (
	InKey Part = iota
	InValue
	InRow   // of a value that is an array of rows
	InIndex // the number of the row; Offset and Bytes mean nothing
)

// Field is one field of a map's entries.
type Field struct {
	Name          string
	Part          Part
	Offset, Bytes int

	kind   kind
	labels map[uint64]string
	wire   bool   // in network byte order
	shift  uint   // of the number; with width: only a part of it is the field
	width  uint   // bits; 0: all
	base   uint64 // is added to the number
	unit   uint   // idle: the time is in units of 2^unit ns
	hidden bool   // always 0, or said by another field
}

// Map is what is known of one pinned map.
type Map struct {
	Name string
	Doc  string

	KeyBytes, ValueBytes int
	Fields               []Field
	// Either lists names for a filter on any of several fields.
	Either map[string][]string

	batch  bool // read by batches: a HASH that changes under traffic
	rows   int  // 0: an entry is one row
	stride int  // bytes of a row
	perCPU perCPU
	sparse bool // rows whose numbers are all 0 are left out
	ring   bool // cannot be read by who does not take away what is in it
	tables bool // the value is the ID of a map with one table
	class  classifier.Class
}

type perCPU uint8

const (
	shared   perCPU = iota
	summed          // u64 words, to be added up
	separate        // a row for each CPU
)

var (
	hooks     = map[uint64]string{1: "EGRESS", 2: "INGRESS"}
	bit       = map[uint64]string{0: "EGRESS", 1: "INGRESS"}
	protocols = map[uint64]string{1: "ICMP", 6: "TCP", 17: "UDP", 33: "DCCP", 47: "GRE", 50: "ESP", 51: "AH", 132: "SCTP", 136: "UDPLITE"}
	outcomes  = map[uint64]string{
		0: "peer", 1: "redirect", 2: "stack", 3: "delivered", 4: "arp", 5: "other", 6: "drop-address", 7: "drop-mac", 8: "drop-header",
		9: "drop-other", 10: "drop-vlan", 11: "drop-unknown", 12: "drop-acl", 13: "drop-group", 14: "drop-policy",
	}
	classes = map[uint64]string{0: "NONE", 1: "SMALL", 2: "MEDIUM", 3: "LARGE"}
	parts   = map[uint64]string{0: "rule", 1: "address", 2: "port", 3: "group"}
	actions = map[uint64]string{0: "-", 1: "deny", 2: "allow"}
)

// Maps lists every map that the data path pins.
func Maps() []Map { return slices.Clone(all) }

var all = []Map{
	{
		Name: "endpoints", Doc: "address of a workload: where it is", KeyBytes: 4, ValueBytes: 32,
		Fields: []Field{
			{Name: "address", Bytes: 4, kind: address, wire: true},
			{Name: "ifindex", Part: InValue, Bytes: 4},
			{Name: "mtu", Part: InValue, Offset: 4, Bytes: 2},
			{Name: "flags", Part: InValue, Offset: 6, Bytes: 2, kind: flags, labels: map[uint64]string{1: "STACK_ONLY", 2: "PASS_OTHER"}},
			{Name: "pod_mac", Part: InValue, Offset: 8, Bytes: 6, kind: mac, wire: true},
			{Name: "host_mac", Part: InValue, Offset: 14, Bytes: 6, kind: mac, wire: true},
			{Name: "gateway", Part: InValue, Offset: 20, Bytes: 4, kind: address, wire: true},
			{Name: "generation", Part: InValue, Offset: 24, Bytes: 8, kind: digits},
		},
	},
	{
		Name: "attachments", Doc: "index of a host link: whose it is", KeyBytes: 4, ValueBytes: 20,
		Fields: []Field{
			{Name: "ifindex", Bytes: 4},
			{Name: "address", Part: InValue, Bytes: 4, kind: address, wire: true},
			{Name: "link", Part: InValue, Offset: 4, Bytes: 16, kind: text},
		},
	},
	{
		Name: "counts", Doc: "address of a workload: what became of its frames", KeyBytes: 4, ValueBytes: 256,
		rows: 16, stride: 16, perCPU: summed, sparse: true,
		Fields: []Field{
			{Name: "address", Bytes: 4, kind: address, wire: true},
			{Name: "outcome", Part: InIndex, kind: label, labels: outcomes},
			{Name: "packets", Part: InRow, Bytes: 8},
			{Name: "bytes", Part: InRow, Offset: 8, Bytes: 8},
		},
	},
	{
		Name: "flows", Doc: "flow between two workloads of this node: by which way", KeyBytes: 16, ValueBytes: 8, batch: true,
		Either: map[string][]string{"address": {"address1", "address2"}, "port": {"port1", "port2"}},
		Fields: []Field{
			{Name: "address1", Bytes: 4, kind: address, wire: true},
			{Name: "port1", Offset: 8, Bytes: 2, wire: true},
			{Name: "address2", Offset: 4, Bytes: 4, kind: address, wire: true},
			{Name: "port2", Offset: 10, Bytes: 2, wire: true},
			{Name: "proto", Offset: 12, Bytes: 1, kind: label, labels: protocols},
			{Name: "pad", Offset: 13, Bytes: 3, hidden: true},
			{Name: "path", Part: InValue, Offset: 4, Bytes: 1, kind: label, labels: map[uint64]string{1: "REDIRECT", 2: "STACK"}},
			{Name: "idle", Part: InValue, Bytes: 4, kind: idle, unit: 30},
			{Name: "pad", Part: InValue, Offset: 5, Bytes: 3, hidden: true},
		},
	},
	{
		Name: "policy_points", Doc: "address of a workload: what applies to it, and its attach epochs", KeyBytes: 4, ValueBytes: 104,
		Fields: []Field{
			{Name: "address", Bytes: 4, kind: address, wire: true},
			{Name: "acl", Part: InValue, Offset: 4, Bytes: 4},
			{Name: "groups", Part: InValue, Offset: 8, Bytes: 64, kind: numbers},
			{Name: "epoch_egress", Part: InValue, Offset: 72, Bytes: 4},
			{Name: "epoch_ingress", Part: InValue, Offset: 76, Bytes: 4},
			{Name: "flags", Part: InValue, Offset: 80, Bytes: 2, kind: flags, labels: map[uint64]string{1: "EGRESS", 2: "INGRESS", 4: "ATTACHED", 8: "CLOSED", 16: "PROBES"}},
			{Name: "generation", Part: InValue, Offset: 88, Bytes: 8, kind: digits},
			{Name: "version", Part: InValue, Bytes: 4},
			{Name: "count", Part: InValue, Offset: 82, Bytes: 2, hidden: true},
			{Name: "key", Part: InValue, Offset: 84, Bytes: 4, hidden: true},
			{Name: "reserved", Part: InValue, Offset: 96, Bytes: 4, hidden: true},
			{Name: "back", Part: InValue, Offset: 100, Bytes: 4, hidden: true},
		},
	},
	{
		Name: "policy_identity", Doc: "address of a peer: the groups that it holds, and its epoch", KeyBytes: 4, ValueBytes: 80,
		Fields: []Field{
			{Name: "address", Bytes: 4, kind: address, wire: true},
			{Name: "groups", Part: InValue, Offset: 8, Bytes: 64, kind: numbers},
			{Name: "epoch", Part: InValue, Offset: 4, Bytes: 4},
			{Name: "version", Part: InValue, Bytes: 4},
			{Name: "key", Part: InValue, Offset: 72, Bytes: 4, hidden: true},
			{Name: "back", Part: InValue, Offset: 76, Bytes: 4, hidden: true},
		},
	},
	{
		Name: "policy_slots", Doc: "policy number and direction: which table is in force", KeyBytes: 4, ValueBytes: 8, sparse: true, batch: true,
		Fields: []Field{
			{Name: "policy", Bytes: 4, shift: 1, width: 31},
			{Name: "direction", Bytes: 4, kind: label, labels: bit, width: 1},
			{Name: "generation", Part: InValue, Bytes: 8, width: 32},
			{Name: "class", Part: InValue, Bytes: 8, shift: 32, width: 8, kind: label, labels: classes},
			{Name: "flags", Part: InValue, Bytes: 8, shift: 40, width: 8, kind: flags, labels: map[uint64]string{1: "VALID", 2: "RESTRICTS", 4: "CLOSED"}},
		},
	},
	tables("policy_small", classifier.Small), tables("policy_medium", classifier.Medium), tables("policy_large", classifier.Large),
	{
		Name: "policy_conntrack", Doc: "flow that policy has admitted, as seen at one hook", KeyBytes: 20, ValueBytes: 32, batch: true,
		Either: map[string][]string{"address": {"saddr", "daddr"}, "port": {"sport", "dport"}},
		Fields: []Field{
			{Name: "hook", Offset: 13, Bytes: 1, kind: label, labels: hooks},
			{Name: "proto", Offset: 12, Bytes: 1, kind: label, labels: protocols},
			{Name: "saddr", Bytes: 4, kind: address, wire: true},
			{Name: "sport", Offset: 8, Bytes: 2, wire: true},
			{Name: "daddr", Offset: 4, Bytes: 4, kind: address, wire: true},
			{Name: "dport", Offset: 10, Bytes: 2, wire: true},
			{Name: "scope", Offset: 14, Bytes: 2, hidden: true},
			{Name: "zero", Offset: 16, Bytes: 4, hidden: true},
			{Name: "state", Part: InValue, Offset: 28, Bytes: 1, kind: label, labels: map[uint64]string{0: "-", 1: "NEW", 2: "ESTABLISHED", 3: "FIN_WAIT"}},
			{Name: "flags", Part: InValue, Offset: 29, Bytes: 1, kind: flags, labels: map[uint64]string{1: "REPLY", 2: "FIN", 4: "ACK", 8: "PROBE"}},
			{Name: "idle", Part: InValue, Bytes: 8, kind: idle},
			{Name: "attach_epoch", Part: InValue, Offset: 8, Bytes: 4},
			{Name: "peer_epoch", Part: InValue, Offset: 12, Bytes: 4},
			{Name: "ack", Part: InValue, Offset: 16, Bytes: 4},
			{Name: "window", Part: InValue, Offset: 20, Bytes: 4},
			{Name: "fin", Part: InValue, Offset: 24, Bytes: 4},
			{Name: "scale", Part: InValue, Offset: 30, Bytes: 1},
			{Name: "zero", Part: InValue, Offset: 31, Bytes: 1, hidden: true},
		},
	},
	{
		Name: "policy_fragments", Doc: "fragmented packet: the ports that its first fragment had", KeyBytes: 16, ValueBytes: 16, batch: true,
		Fields: []Field{
			{Name: "saddr", Bytes: 4, kind: address, wire: true},
			{Name: "daddr", Offset: 4, Bytes: 4, kind: address, wire: true},
			{Name: "id", Offset: 8, Bytes: 2, wire: true},
			{Name: "proto", Offset: 10, Bytes: 1, kind: label, labels: protocols},
			{Name: "zero", Offset: 11, Bytes: 1, hidden: true},
			{Name: "scope", Offset: 12, Bytes: 4, hidden: true},
			{Name: "sport", Part: InValue, Bytes: 2, wire: true},
			{Name: "dport", Part: InValue, Offset: 2, Bytes: 2, wire: true},
			{Name: "idle", Part: InValue, Offset: 8, Bytes: 8, kind: idle},
			{Name: "zero", Part: InValue, Offset: 4, Bytes: 4, hidden: true},
		},
	},
	{
		Name: "policy_reasons", Doc: "reason: how many packets met it, on all workloads", KeyBytes: 4, ValueBytes: 8, perCPU: summed, sparse: true,
		Fields: []Field{
			{Name: "reason", Bytes: 4, base: 200},
			{Name: "name", Bytes: 4, base: 200, kind: label, labels: reasons()},
			{Name: "packets", Part: InValue, Bytes: 8},
		},
	},
	{
		Name: "policy_scratch", Doc: "rules of the last look-up by group, for each CPU", KeyBytes: 4, ValueBytes: 128, perCPU: separate,
		Fields: []Field{
			{Name: "cpu", Part: InIndex},
			{Name: "rules", Part: InValue, Bytes: 128, kind: bitmap},
			{Name: "zero", Bytes: 4, hidden: true},
		},
	},
	{
		Name: "trace_until", Doc: "until when a trace runs, ns of CLOCK_MONOTONIC", KeyBytes: 4, ValueBytes: 8, sparse: true,
		Fields: []Field{
			{Name: "until", Part: InValue, Bytes: 8},
			{Name: "zero", Bytes: 4, hidden: true},
		},
	},
	{
		Name: "trace_sessions", Doc: "number of a trace: which flow it is about, until when", KeyBytes: 4, ValueBytes: 24, sparse: true,
		Fields: []Field{
			{Name: "session", Bytes: 4},
			{Name: "from", Part: InValue, Offset: 8, Bytes: 4, kind: address, wire: true},
			{Name: "to", Part: InValue, Offset: 12, Bytes: 4, kind: address, wire: true},
			{Name: "proto", Part: InValue, Offset: 18, Bytes: 2, kind: label, labels: protocols},
			{Name: "port", Part: InValue, Offset: 16, Bytes: 2, wire: true},
			{Name: "until", Part: InValue, Bytes: 8},
			{Name: "zero", Part: InValue, Offset: 20, Bytes: 4, hidden: true},
		},
	},
	{
		Name: "trace_packets", Doc: "the last packet that was compared with traces, for each CPU, and the events that found no room", KeyBytes: 4, ValueBytes: 40, perCPU: separate,
		Fields: []Field{
			{Name: "cpu", Part: InIndex},
			{Name: "saddr", Part: InValue, Offset: 16, Bytes: 4, kind: address, wire: true},
			{Name: "sport", Part: InValue, Offset: 24, Bytes: 2, wire: true},
			{Name: "daddr", Part: InValue, Offset: 20, Bytes: 4, kind: address, wire: true},
			{Name: "dport", Part: InValue, Offset: 26, Bytes: 2, wire: true},
			{Name: "proto", Part: InValue, Offset: 32, Bytes: 1, kind: label, labels: protocols},
			{Name: "hook", Part: InValue, Offset: 33, Bytes: 1, kind: label, labels: map[uint64]string{0: "-", 1: "from_container", 2: "to_container", 3: "from_child", 4: "to_child"}},
			{Name: "lost", Part: InValue, Offset: 8, Bytes: 8},
			{Name: "began", Part: InValue, Bytes: 8, hidden: true},
			{Name: "sessions", Part: InValue, Offset: 28, Bytes: 2, hidden: true},
			{Name: "replies", Part: InValue, Offset: 30, Bytes: 2, hidden: true},
			{Name: "tcp_flags", Part: InValue, Offset: 34, Bytes: 1, hidden: true},
			{Name: "zero", Part: InValue, Offset: 35, Bytes: 1, hidden: true},
			{Name: "len", Part: InValue, Offset: 36, Bytes: 4, hidden: true},
			{Name: "zero", Bytes: 4, hidden: true},
		},
	},
	{Name: "trace_events", Doc: "what traces are told; cannot be dumped, see mknetd trace", ring: true},
}

func tables(name string, c classifier.Class) Map {
	return Map{
		Name: name, Doc: "generation: a compiled direction of a policy (" + c.String() + "); --inner GENERATION shows its rules", KeyBytes: 4, ValueBytes: 4, tables: true, class: c,
		Fields: []Field{
			{Name: "generation", Bytes: 4},
			{Name: "map", Part: InValue, Bytes: 4},
			// What follows is of the inner map's header.
			{Name: "policy", Part: InRow, Offset: 8, Bytes: 4},
			{Name: "direction", Part: InRow, Offset: 4, Bytes: 4, kind: label, labels: map[uint64]string{0: "INGRESS", 1: "EGRESS"}, shift: 3, width: 1},
			{Name: "kind", Part: InRow, Offset: 4, Bytes: 4, kind: label, labels: map[uint64]string{0: "ACL", 1: "GROUP"}, shift: 2, width: 1},
			{Name: "flags", Part: InRow, Offset: 4, Bytes: 4, kind: flags, labels: map[uint64]string{1: "RESTRICTS", 2: "CLOSED"}, width: 2},
			{Name: "rules", Part: InRow, Offset: 16, Bytes: 4},
			{Name: "no_match", Part: InRow, Offset: 40, Bytes: 8},
		},
	}
}

// inner is what --inner shows of one table.
var inner = Map{
	Name: "table",
	Fields: []Field{
		{Name: "part", kind: label, labels: parts},
		{Name: "index"},
		{Name: "from", kind: text},
		{Name: "rules", kind: numbers},
		{Name: "action", kind: label, labels: actions}, // of rules only
		{Name: "hits"},
	},
}

// reasons are those that programs count.
func reasons() map[uint64]string {
	out := map[uint64]string{}
	for i := range policy.Reason(128) {
		r := 200 + i
		if name := r.String(); !strings.HasPrefix(name, "reason ") {
			out[uint64(r)] = name
		}
	}
	return out
}

// kernelTypes are the types that a map may have, by what is known of it.
func (m Map) kernelTypes() []ebpf.MapType {
	switch {
	case m.tables:
		return []ebpf.MapType{ebpf.HashOfMaps}
	case m.perCPU != shared:
		return []ebpf.MapType{ebpf.PerCPUHash, ebpf.PerCPUArray}
	}
	return []ebpf.MapType{ebpf.Hash, ebpf.LRUHash, ebpf.Array}
}

// Names lists the fields that are shown and may be filtered by.
func (m Map) Names() []string {
	var out []string
	for _, f := range m.Fields {
		if !f.hidden {
			out = append(out, f.Name)
		}
	}
	return out
}

// find returns the map of a name.
func find(name string) (Map, error) {
	names := make([]string, len(all))
	for i, m := range all {
		if m.Name == name {
			return m, nil
		}
		names[i] = m.Name
	}
	return Map{}, &UsageError{"map " + quote(name) + ": must be one of " + strings.Join(names, ", ")}
}
