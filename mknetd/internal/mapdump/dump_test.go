package mapdump

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/cilium/ebpf"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
	"mknet/tests/netlab"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { netlab.Main(m) }

// fake is a map in memory that counts how it is read.
type fake struct {
	keys, values [][]byte
	tables       map[uint32][]byte // by ID
	lookups      int
	walks        int
}

func (f *fake) lookup(key []byte) ([]byte, error) {
	f.lookups++
	for i, k := range f.keys {
		if bytes.Equal(k, key) {
			return f.values[i], nil
		}
	}
	return nil, nil
}

func (f *fake) each(g func(key, value []byte) bool) error {
	f.walks++
	for i, k := range f.keys {
		if !g(k, f.values[i]) {
			break
		}
	}
	return nil
}

func (f *fake) table(value []byte) ([]byte, error) {
	return f.tables[binary.LittleEndian.Uint32(value)], nil
}

func (f *fake) Close() error { return nil }

func (f *fake) put(key, value []byte) {
	f.keys, f.values = append(f.keys, key), append(f.values, value)
}

// pack lays parts out one after the other: uint8 to uint64 little-endian, text and
// bytes as they are.
func pack(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch v := p.(type) {
		case string:
			b = append(b, v...)
		case []byte:
			b = append(b, v...)
		default:
			b, _ = binary.Append(b, binary.LittleEndian, v)
		}
	}
	return b
}

// never is a time in the future: what was seen then is idle for no time.
const never = uint64(1) << 62

var groups = append(pack(uint32(3), uint32(4)), make([]byte, 56)...)

// table compiles three rules, of which one names group 3.
func table(t *testing.T) []byte {
	t.Helper()
	objects, err := policy.Parse([]byte(`{apiVersion: mknet/v1, kind: SecurityGroup, metadata: {name: g}, spec: {ingress: [
		{protocol: tcp, ports: [{port: 80}, {portRange: {from: 100, to: 200}}], from: [{cidr: 10.1.0.0/16}]}, {from: [{securityGroupRef: {name: g}}]}, {protocol: icmp}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	compiled, err := classifier.Compile(objects[0].(*policy.SecurityGroup).Rules(policy.Ingress), 3, classifier.GroupNumbers{"g": 3})
	if err != nil {
		t.Fatal(err)
	}
	classifier.SetGeneration(compiled.Bytes, 7)
	l := classifier.Small.Layout()
	copy(compiled.Bytes[l.Hits:], pack(uint64(5), uint64(0), uint64(9)))
	return compiled.Bytes
}

// sample has an entry or more of every map.
func sample(t *testing.T, name string) *fake {
	t.Helper()
	f := &fake{}
	a, b := "\x0a\x58\x00\x02", "\x0a\x58\x00\x03"
	two := func(v []byte) []byte { return append(slices.Clone(v), v...) } // two CPUs
	switch name {
	case "endpoints":
		f.put(pack(a), pack(uint32(12), uint16(1500), uint16(1), "\x02\x00\x0a\x58\x00\x02", "\x02\x00\x0a\x58\x01\x02", "\x0a\x58\x00\x01", uint64(0x0123456789abcdef)))
		f.put(pack(b), pack(uint32(13), uint16(1400), uint16(0x43), "\x02\x00\x0a\x58\x00\x03", "\x02\x00\x0a\x58\x01\x03", "\x0a\x58\x00\x01", uint64(0x01ff456789abcdef)))
	case "attachments":
		f.put(pack(uint32(12)), pack(a, "lxc0123456789ab\x00"))
	case "counts":
		f.put(pack(a), two(append(pack(uint64(2), uint64(196), uint64(0), uint64(0), uint64(1), uint64(98)), make([]byte, 208)...)))
	case "flows":
		f.put(pack(a, b, "\x9c\x40\x00\x50", uint8(6), "\x00\x00\x00"), pack(uint32(0), uint8(1), "\x00\x00\x00"))
		f.values[0][3] = 0x40 // ahead of the clock
	case "policy_points":
		f.put(pack(a), pack(uint32(9), uint32(1), groups, uint32(21), uint32(22), uint16(7), uint16(2), a, uint64(0x0123456789abcdef), uint32(0), uint32(9)))
	case "policy_identity":
		f.put(pack(a), pack(uint32(9), uint32(23), groups, a, uint32(9)))
	case "policy_slots":
		f.put(pack(uint32(2)), pack(uint64(7)|1<<32|3<<40))
		f.put(pack(uint32(3)), pack(uint64(1)<<40))
		f.put(pack(uint32(4)), pack(uint64(0)))
	case "policy_small":
		f.put(pack(uint32(7)), pack(uint32(100)))
		f.put(pack(uint32(8)), pack(uint32(101))) // whose map went meanwhile
		f.tables = map[uint32][]byte{100: table(t)}
	case "policy_medium", "policy_large":
	case "policy_conntrack":
		f.put(pack(a, b, "\x9c\x40\x00\x50", uint8(6), uint8(1), uint16(0), uint32(0)), pack(never, uint32(21), uint32(23), uint32(1000), uint32(65535), uint32(0), uint8(2), uint8(4), uint8(7), uint8(0)))
		f.put(pack(b, a, "\x00\x50\x9c\x40", uint8(6), uint8(2), uint16(0), uint32(0)), pack(never, uint32(21), uint32(23), uint32(2000), uint32(65535), uint32(0), uint8(2), uint8(5), uint8(7), uint8(0)))
		f.put(pack(a, b, "\x00\x00\x00\x00", uint8(103), uint8(1), uint16(0), uint32(0)), pack(never, uint32(21), make([]byte, 20)))
	case "policy_fragments":
		f.put(pack(a, b, "\x12\x34", uint8(17), uint8(0), uint32(0)), pack("\x9c\x40\x00\x35", uint32(0), never))
	case "policy_reasons":
		f.put(pack(uint32(9)), two(pack(uint64(40))))
		f.put(pack(uint32(101)), two(pack(uint64(2))))
		f.put(pack(uint32(102)), two(pack(uint64(0))))
	case "policy_scratch":
		f.put(pack(uint32(0)), append(append(pack(uint64(0b1011)), make([]byte, 120)...), make([]byte, 128)...))
	case "trace_until":
		f.put(pack(uint32(0)), pack(uint64(5e9)))
	case "trace_sessions":
		f.put(pack(uint32(0)), make([]byte, 24))
		f.put(pack(uint32(1)), pack(uint64(5e9), a, b, "\x00\x50", uint16(6), uint32(0)))
	case "trace_packets":
		f.put(pack(uint32(0)), two(pack(uint64(4e9), uint64(3), a, b, "\x9c\x40\x00\x50", uint16(2), uint16(0), uint8(6), uint8(1), uint8(2), uint8(0), uint32(74))))
	default:
		t.Fatalf("no sample of map %s", name)
	}
	return f
}

func read(t *testing.T, req Request) (Dump, *fake, error) {
	t.Helper()
	m, err := find(req.Map)
	if err == nil {
		err = m.check(req)
	}
	if err != nil {
		return Dump{}, nil, err
	}
	f := sample(t, m.Name)
	d, err := m.read(f, req)
	return d, f, err
}

// Every map as table and JSON, and the rules of a table.
func TestGolden(t *testing.T) {
	seven := uint32(7)
	requests := []Request{{Map: "policy_small", Inner: &seven}}
	for _, m := range Maps() {
		if !m.ring {
			requests = append(requests, Request{Map: m.Name})
		}
	}
	for _, req := range requests {
		name := req.Map
		if req.Inner != nil {
			name += "-inner"
		}
		t.Run(name, func(t *testing.T) {
			d, _, err := read(t, req)
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			w := tabwriter.NewWriter(&got, 0, 0, 2, ' ', 0)
			d.Table(w)
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
			text, err := json.MarshalIndent(d, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got.Write(append(text, '\n'))
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("got\n%s\nwant\n%s", got.Bytes(), want)
			}
		})
	}
}

func TestFilters(t *testing.T) {
	for _, c := range []struct {
		of      string
		filters []string
		want    int
		byKey   bool
		err     string
	}{
		{"endpoints", []string{"address=10.88.0.2"}, 1, true, ""},
		{"endpoints", []string{"address=10.88.0.2", "mtu=1400"}, 0, true, ""},
		{"endpoints", []string{"address=10.88.0.2/31"}, 2, false, ""},
		{"endpoints", []string{"address=10.88.0.2/32"}, 1, true, ""},
		{"endpoints", []string{"address=0.0.0.0/0"}, 2, false, ""},
		{"endpoints", []string{"mtu=1500"}, 1, false, ""},
		{"endpoints", []string{"flags=pass_other,STACK_ONLY"}, 1, false, ""},
		{"endpoints", []string{"flags=1"}, 1, false, ""},
		{"endpoints", []string{"flags=NONE"}, 0, false, ""},
		{"endpoints", []string{"host_mac=02-00-0a-58-01-03"}, 1, false, ""},
		{"endpoints", []string{"generation=01"}, 2, false, ""},
		{"endpoints", []string{"generation=0123456789abcdef"}, 1, false, ""},
		{"endpoints", []string{" mtu = 1500 "}, 1, false, ""},
		{"attachments", []string{"link=lxc0123456789ab"}, 1, false, ""},
		{"attachments", []string{"link=lxc"}, 0, false, ""},
		{"flows", []string{"address=10.88.0.3", "port=80"}, 1, false, ""},
		{"flows", []string{"address1=10.88.0.2", "address2=10.88.0.3", "port1=40000", "port2=80", "proto=TCP"}, 1, true, ""},
		{"policy_points", []string{"groups=4"}, 1, false, ""},
		{"policy_points", []string{"groups=5"}, 0, false, ""},
		{"policy_slots", []string{"policy=1"}, 2, false, ""},
		{"policy_slots", []string{"policy=1", "direction=ingress"}, 1, true, ""},
		{"policy_slots", []string{"policy=2", "direction=EGRESS"}, 0, true, ""},
		{"policy_small", []string{"generation=7"}, 1, true, ""},
		{"policy_small", []string{"kind=GROUP", "direction=INGRESS", "policy=3"}, 1, false, ""},
		{"policy_conntrack", []string{"proto=103"}, 1, false, ""},
		{"policy_conntrack", []string{"hook=INGRESS", "state=established"}, 1, false, ""},
		{"policy_conntrack", []string{"hook=2", "state=2"}, 1, false, ""},
		{"policy_conntrack", []string{"saddr=10.88.0.2", "saddr=10.88.0.3"}, 0, false, ""},
		{"policy_reasons", []string{"reason=209"}, 1, true, ""},
		{"policy_reasons", []string{"name=conntrack hit", "packets=80"}, 1, true, ""},
		{"policy_scratch", []string{"cpu=1"}, 1, true, ""},

		{"trace_sessions", []string{"session=1", "proto=TCP"}, 1, true, ""},
		{"trace_packets", []string{"hook=FROM_CONTAINER"}, 2, true, ""},
		{"trace_events", nil, 0, false, "see mknetd trace"},
		{"nothing", nil, 0, false, "must be one of endpoints, attachments, counts"},
		{"endpoints", []string{"colour=red"}, 0, false, "has no such field; it has address, ifindex, mtu, flags, pod_mac, host_mac, gateway, generation"},
		{"flows", []string{"pad=0"}, 0, false, "path, idle, address, port"},
		{"endpoints", []string{"address"}, 0, false, "must be FIELD=VALUE"},
		{"endpoints", []string{"address=fe80::1"}, 0, false, "must be an IPv4 address or prefix"},
		{"endpoints", []string{"address=10.88.0.2/16"}, 0, false, "no bits behind its length"},
		{"endpoints", []string{"mtu=70000"}, 0, false, "must be 0 to 65535"},
		{"endpoints", []string{"mtu=much"}, 0, false, "must be a number"},
		{"endpoints", []string{"flags=RED"}, 0, false, `"RED" is none of STACK_ONLY, PASS_OTHER, NONE, or a number`},
		{"endpoints", []string{"pod_mac=10.0.0.1"}, 0, false, "must be a hardware address"},
		{"endpoints", []string{"generation=xyz"}, 0, false, "at most 16 hexadecimal digits"},
		{"policy_conntrack", []string{"hook=SIDEWAYS"}, 0, false, "must be EGRESS, INGRESS or a number"},
		{"policy_conntrack", []string{"proto=256"}, 0, false, "must be 0 to 255"},
		{"policy_conntrack", []string{"idle=3"}, 0, false, "cannot be filtered by"},
		{"policy_reasons", []string{"reason=9"}, 0, false, "must be 200 to"},
	} {
		d, f, err := read(t, Request{Map: c.of, Filters: c.filters})
		if c.err != "" {
			var wrong *UsageError
			if !errors.As(err, &wrong) || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s %v: %v, want a usage error with %q", c.of, c.filters, err, c.err)
			}
			continue
		}
		if err != nil || len(d.Entries) != c.want {
			t.Errorf("%s %v: %d entries, %v; want %d", c.of, c.filters, len(d.Entries), err, c.want)
			continue
		}
		if c.byKey && (f.lookups != 1 || f.walks != 0) || !c.byKey && f.walks != 1 {
			t.Errorf("%s %v: %d look-ups and %d walks; the whole key is given: %t", c.of, c.filters, f.lookups, f.walks, c.byKey)
		}
	}
}

func TestLimitAndInner(t *testing.T) {
	for limit, more := range map[int]bool{1: true, 2: true, 3: false, 4: false, 0: false} {
		d, _, err := read(t, Request{Map: "policy_conntrack", Limit: limit})
		want := limit
		if limit == 0 || limit > 3 {
			want = 3
		}
		if err != nil || len(d.Entries) != want || d.Limited != more {
			t.Errorf("limit %d: %d entries, more: %t, %v", limit, len(d.Entries), d.Limited, err)
		}
	}
	seven, eight, nine := uint32(7), uint32(8), uint32(9)
	for _, c := range []struct {
		name string
		req  Request
		want string
	}{
		{"negative limit", Request{Map: "endpoints", Limit: -1}, "must not be negative"},
		{"map without tables", Request{Map: "endpoints", Inner: &seven}, "has no inner maps; policy_small, policy_medium, policy_large have"},
		{"unknown generation", Request{Map: "policy_small", Inner: &nine}, "there is no such table; there are 7-8"},
		{"table gone meanwhile", Request{Map: "policy_small", Inner: &eight}, "there is no such table"},
		{"empty map", Request{Map: "policy_large", Inner: &seven}, "the map is empty"},
		{"unknown field of a table", Request{Map: "policy_small", Inner: &seven, Filters: []string{"saddr=1.2.3.4"}}, "it has part, index, from, rules, action, hits"},
		{"unknown part", Request{Map: "policy_small", Inner: &seven, Filters: []string{"part=x"}}, "must be rule, address, port, group or a number"},
	} {
		if _, _, err := read(t, c.req); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	d, _, err := read(t, Request{Map: "policy_small", Inner: &seven, Filters: []string{"part=rule", "action=allow"}, Limit: 2})
	if err != nil || len(d.Entries) != 2 || !d.Limited {
		t.Errorf("rules of a table: %d entries, %v", len(d.Entries), err)
	}
}

// Pins are opened read-only; what is absent, of another layout or emptied
// meanwhile is said.
func TestPins(t *testing.T) {
	dir := "/sys/fs/bpf/mapdump"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		netlab.Missing(t, err, "run as root with a bpffs on /sys/fs/bpf")
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	pin := func(name string, s ebpf.MapSpec) *ebpf.Map {
		m, err := ebpf.NewMap(&s)
		if err == nil {
			err = m.Pin(filepath.Join(dir, name))
		}
		if err != nil {
			netlab.Missing(t, err, "run as root with a bpffs on /sys/fs/bpf")
		}
		t.Cleanup(func() { m.Close() })
		return m
	}
	flows := pin("policy_conntrack", ebpf.MapSpec{Type: ebpf.Hash, KeySize: 20, ValueSize: 32, MaxEntries: 16384})
	pin("flows", ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 20, ValueSize: 8, MaxEntries: 64})
	endpoints := pin("endpoints", ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 32, MaxEntries: 64, Flags: 1})
	for i := range uint32(3 * batchSize) {
		if err := flows.Put(pack(i, uint32(0), uint32(0), uint8(17), uint8(1), uint16(0), uint32(0)), make([]byte, 32)); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Read(dir, Request{Map: "policy_conntrack", Filters: []string{"proto=UDP"}})
	if err != nil || len(d.Entries) != 3*batchSize || d.Read != 3*batchSize {
		t.Errorf("%d entries of %d, %v", len(d.Entries), d.Read, err)
	}
	if d, err = Read(dir, Request{Map: "policy_conntrack", Limit: 10}); err != nil || len(d.Entries) != 10 || d.Read > 11 {
		t.Errorf("limit 10: %d entries, %d read, %v", len(d.Entries), d.Read, err)
	}
	m, err := find("endpoints")
	if err != nil {
		t.Fatal(err)
	}
	from, err := m.open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	if err := from.(*kernelMap).Put(make([]byte, 4), make([]byte, 32)); !errors.Is(err, os.ErrPermission) {
		t.Errorf("write through what was opened for reading: %v", err)
	}
	for i := range uint32(5) {
		if err := endpoints.Put(pack(i), make([]byte, 32)); err != nil {
			t.Fatal(err)
		}
	}
	if d, err := Read(dir, Request{Map: "endpoints"}); err != nil || len(d.Entries) != 5 {
		t.Errorf("%d entries, %v", len(d.Entries), err)
	}
	var absent *AbsentError
	if _, err := Read(dir, Request{Map: "counts"}); !errors.As(err, &absent) || absent.NoDir {
		t.Errorf("a map that is not pinned: %v", err)
	}
	if _, err := Read(dir+"/none", Request{Map: "counts"}); !errors.As(err, &absent) || !absent.NoDir {
		t.Errorf("a folder that is not there: %v", err)
	}
	if _, err := Read(dir, Request{Map: "flows"}); err == nil || !strings.Contains(err.Error(), "use the mknetd that pinned it") {
		t.Errorf("a map of another layout: %v", err)
	}
}
