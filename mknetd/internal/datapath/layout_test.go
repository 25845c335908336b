package datapath

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"mknet/mknetd/internal/enforcer"
)

// flowKey is struct flow_key: the side with the numerically lower address, read
// as a little-endian number, comes first.
type flowKey struct {
	Address  [2]address
	Port     [2][2]byte // as on the wire
	Protocol uint8
	_        [3]byte
}

// Values of flowValue.Path, enum path.
const (
	byRedirect uint8 = 1
	byStack    uint8 = 2
)

// flowValue is struct flow.
type flowValue struct {
	Seen uint32 // CLOCK_MONOTONIC in units of 2^30 ns
	Path uint8
	_    [3]byte
}

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
