package datapath

import (
	"bytes"
	"encoding/binary"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"mknet/mknetd/internal/enforcer"
	"mknet/mknetd/internal/mapdump"
)

// The Go mirrors are laid out as the C structs are.
func TestLayout(t *testing.T) {
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		mirror any
	}{
		{"endpoint", endpointValue{}},
		{"attachment", attachmentValue{}},
		{"counters", countersValue{}},
		{"flow_key", flowKey{}},
		{"flow", flowValue{}},
		{"ct_key", ctKey{}},
		{"ct", ctValue{}},
		{"trace_session", traceSession{}},
		{"trace_packet", tracePacket{}},
		{"point", [enforcer.PointBytes]byte{}},
		{"identity", [enforcer.IdentityBytes]byte{}},
	} {
		var s *btf.Struct
		if err := spec.Types.TypeByName(c.name, &s); err != nil {
			t.Fatal(err)
		}
		mirror := reflect.TypeOf(c.mirror)
		if got := mirror.Size(); got != uintptr(s.Size) {
			t.Errorf("%s: mirror has %d bytes, struct %d", c.name, got, s.Size)
		}
		if mirror.Kind() != reflect.Struct {
			continue
		}
		if mirror.NumField() != len(s.Members) {
			t.Fatalf("%s: mirror has %d fields, struct %d", c.name, mirror.NumField(), len(s.Members))
		}
		for i, m := range s.Members {
			if got := mirror.Field(i).Offset; got != uintptr(m.Offset.Bytes()) {
				t.Errorf("%s.%s: mirror at %d, struct at %d", c.name, m.Name, got, m.Offset.Bytes())
			}
		}
	}
}

// The key that is written byte by byte is the one that the library writes.
func TestKeyBytes(t *testing.T) {
	k := ctKey{
		Source: address{1, 2, 3, 4}, Destination: address{5, 6, 7, 8}, SourcePort: [2]byte{9, 10}, DestinationPort: [2]byte{11, 12},
		Protocol: 13, Hook: 14, Scope: 15 | 16<<8, Zero: 17 | 18<<8 | 19<<16 | 20<<24,
	}
	want, err := binary.Append(nil, binary.NativeEndian, k)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, ctKeyBytes)
	k.put(got)
	if !bytes.Equal(got, want) {
		t.Errorf("key is %x, want %x", got, want)
	}
	if n := binary.Size(ctValue{}); n != ctValueBytes || len(want) != ctKeyBytes {
		t.Errorf("a key has %d bytes and a value %d, want %d and %d", len(want), n, ctKeyBytes, ctValueBytes)
	}
}

// The outcomes are those of the C source, in its order. (Unlike the structs, an
// enum that only names constants leaves no trace in the object.)
func TestOutcomes(t *testing.T) {
	src, err := os.ReadFile("bpf/maps.h")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(src), "enum outcome {")
	body, _, _ = strings.Cut(body, "OUTCOMES")
	names := regexp.MustCompile(`(?m)^\t([A-Z_]+),`).FindAllStringSubmatch(body, -1)
	if len(names) != int(outcomes) {
		t.Fatalf("bpf/maps.h has %d outcomes, Go %d", len(names), outcomes)
	}
	for i, n := range names {
		if want := strings.ReplaceAll(strings.ToUpper(Outcome(i).String()), "-", "_"); n[1] != want {
			t.Errorf("outcome %d: bpf/maps.h has %s, Go %s", i, n[1], want)
		}
	}
}

// `mknetd bpf dump` knows every map, and every byte of keys and values as the C
// structs have them.
func TestDumpKnowsEveryMap(t *testing.T) {
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]mapdump.Map{}
	for _, m := range mapdump.Maps() {
		known[m.Name] = m
	}
	for name, s := range spec.Maps {
		if name[0] == '.' {
			continue // constants, not pinned
		}
		m, ok := known[name]
		if delete(known, name); !ok {
			t.Errorf("map %s: cannot be dumped", name)
			continue
		}
		if m.KeyBytes != int(s.KeySize) || m.ValueBytes != int(s.ValueSize) {
			t.Errorf("map %s: %d and %d bytes, want %d and %d", name, m.KeyBytes, m.ValueBytes, s.KeySize, s.ValueSize)
		}
		covers(t, name+" key", m, mapdump.InKey, s.Key, s.KeySize)
		if name != "counts" { // an array of rows
			covers(t, name+" value", m, mapdump.InValue, s.Value, s.ValueSize)
		}
	}
	for name := range known {
		t.Errorf("map %s: can be dumped, and there is no such map", name)
	}
	var row *btf.Struct
	if err := spec.Types.TypeByName("count", &row); err != nil {
		t.Fatal(err)
	}
	counts := mapdump.Maps()[2]
	covers(t, "a row of "+counts.Name, counts, mapdump.InRow, row, row.Size)
	for i := range outcomes {
		if got := counts.Fields[1].Label(uint64(i)); got != i.String() {
			t.Errorf("outcome %d is %q in dumps, want %q", i, got, i)
		}
	}
}

// covers wants the fields to lie each within one member of the type, and to leave
// no byte out.
func covers(t *testing.T, what string, m mapdump.Map, part mapdump.Part, of btf.Type, size uint32) {
	t.Helper()
	type span struct{ from, to int }
	members := []span{{0, int(size)}}
	if of != nil {
		if s, ok := btf.UnderlyingType(of).(*btf.Struct); ok {
			members = nil
			for i, member := range s.Members {
				end := int(size)
				if i+1 < len(s.Members) {
					end = int(s.Members[i+1].Offset.Bytes())
				}
				members = append(members, span{int(member.Offset.Bytes()), end})
			}
		}
	}
	seen := make([]bool, size)
	for _, f := range m.Fields {
		if f.Part != part {
			continue
		}
		within := false
		for _, s := range members {
			within = within || f.Offset >= s.from && f.Offset+f.Bytes <= s.to
		}
		if !within {
			t.Errorf("%s: field %s, bytes %d to %d, lies in no member", what, f.Name, f.Offset, f.Offset+f.Bytes)
		}
		for i := f.Offset; i < f.Offset+f.Bytes && i < int(size); i++ {
			seen[i] = true
		}
	}
	for i, ok := range seen {
		if !ok {
			t.Errorf("%s: byte %d is in no field", what, i)
			break
		}
	}
}
