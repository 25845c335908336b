package mapdump

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// UsageError says that a question names what does not exist.
type UsageError struct{ Problem string }

func (e *UsageError) Error() string { return e.Problem }

func usage(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

func quote(s string) string { return strconv.Quote(s) }

// filter wants a field, or one of several, to have a value.
type filter struct {
	fields []int // of the map
	want   uint64
	mask   uint64 // the bits that count
	text   string
}

// parseFilters reads filters as they are typed: NAME=VALUE.
func (m Map) parseFilters(list []string) ([]filter, error) {
	var out []filter
	for _, s := range list {
		name, value, ok := strings.Cut(s, "=")
		if !ok {
			return nil, usage("filter %q: must be FIELD=VALUE", s)
		}
		f, err := m.parseFilter(strings.TrimSpace(name), strings.TrimSpace(value))
		if err != nil {
			return nil, err
		}
		out = append(out, f)
	}
	return out, nil
}

func (m Map) parseFilter(name, value string) (filter, error) {
	names, ok := m.Either[name]
	if !ok {
		names = []string{name}
	}
	var out filter
	for i, f := range m.Fields {
		if !f.hidden && slices.Contains(names, f.Name) {
			out.fields = append(out.fields, i)
		}
	}
	if len(out.fields) == 0 {
		have := m.Names()
		for either := range m.Either {
			have = append(have, either)
		}
		slices.Sort(have[len(m.Names()):])
		return out, usage("filter %q: map %s has no such field; it has %s", name, m.Name, strings.Join(have, ", "))
	}
	err := m.Fields[out.fields[0]].parse(value, &out)
	if err != nil {
		return out, usage("filter %s=%s: %v", name, value, err)
	}
	return out, nil
}

// parse reads what the field shall be.
func (f Field) parse(s string, to *filter) error {
	to.mask = ^uint64(0)
	switch f.kind {
	case address:
		return parseAddress(s, to)
	case mac:
		hw, err := net.ParseMAC(s)
		if err != nil || len(hw) != 6 {
			return fmt.Errorf("must be a hardware address such as 02:00:0a:58:00:02")
		}
		to.want = binary.BigEndian.Uint64(append([]byte{0, 0}, hw...))
		return nil
	case label:
		for n, name := range f.labels {
			if strings.EqualFold(name, s) {
				to.want = n
				return nil
			}
		}
		return f.parseNumber(s, to, "must be "+strings.Join(f.labelNames(), ", ")+" or a number")
	case flags:
		return f.parseFlags(s, to)
	case digits:
		n, err := strconv.ParseUint(s, 16, 64)
		if err != nil || len(s) > 16 {
			return fmt.Errorf("must be at most 16 hexadecimal digits")
		}
		shift := 64 - 4*uint(len(s))
		to.want, to.mask = n<<shift, ^uint64(0)<<shift
		return nil
	case text:
		to.text = s
		return nil
	case bitmap, idle:
		return fmt.Errorf("the field cannot be filtered by")
	}
	return f.parseNumber(s, to, "must be a number")
}

func (f Field) parseNumber(s string, to *filter, otherwise string) error {
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		return fmt.Errorf("%s", otherwise)
	}
	if high := f.max(); f.kind != numbers && (n > high || n < f.base) {
		return fmt.Errorf("must be %d to %d", f.base, high)
	}
	to.want = n
	return nil
}

func parseAddress(s string, to *filter) error {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		a, err := netip.ParseAddr(s)
		if err != nil || !a.Is4() {
			return fmt.Errorf("must be an IPv4 address or prefix")
		}
		p = netip.PrefixFrom(a, 32)
	}
	if !p.Addr().Is4() || p.Masked() != p {
		return fmt.Errorf("must be an IPv4 address or prefix, with no bits behind its length")
	}
	b := p.Addr().As4()
	to.want = uint64(binary.BigEndian.Uint32(b[:]))
	if p.Bits() < 32 {
		to.mask = ^uint64(0) << (32 - p.Bits())
	}
	return nil
}

// parseFlags reads labels, all of which must be set, NONE, or the exact number.
func (f Field) parseFlags(s string, to *filter) error {
	if n, err := strconv.ParseUint(s, 0, 64); err == nil {
		return f.parseNumber(strconv.FormatUint(n, 10), to, "")
	}
	if strings.EqualFold(s, "NONE") {
		return nil
	}
	for _, one := range strings.Split(s, ",") {
		set := uint64(0)
		for b, name := range f.labels {
			if strings.EqualFold(name, strings.TrimSpace(one)) {
				set = b
			}
		}
		if set == 0 {
			return fmt.Errorf("%q is none of %s, NONE, or a number", one, strings.Join(f.labelNames(), ", "))
		}
		to.want |= set
	}
	to.mask = to.want
	return nil
}

// matches reports whether a row is wanted.
func (f filter) matches(m Map, row []cell) bool {
	return slices.ContainsFunc(f.fields, func(i int) bool {
		c := row[i]
		switch m.Fields[i].kind {
		case text:
			return c.s == f.text
		case numbers:
			return slices.Contains(c.list, f.want)
		}
		return c.n&f.mask == f.want
	})
}

// key returns the key that the filters give, false where they leave some of it open.
func (m Map) key(filters []filter) ([]byte, bool) {
	key, known := make([]byte, m.KeyBytes), make([]byte, m.KeyBytes)
	for _, f := range m.Fields {
		if f.Part == InKey && f.hidden { // always 0
			putAll(known[f.Offset : f.Offset+f.Bytes])
		}
	}
	for _, w := range filters {
		f := m.Fields[w.fields[0]]
		if len(w.fields) > 1 || f.Part != InKey || w.mask&f.mask() != f.mask() || f.kind == text || f.kind == numbers {
			continue
		}
		at, n := make([]byte, f.Bytes), make([]byte, f.Bytes)
		putWord(at, f.mask()<<f.shift, f.wire)
		putWord(n, (w.want-f.base)&f.mask()<<f.shift, f.wire)
		for i := range at {
			key[f.Offset+i] = key[f.Offset+i]&^at[i] | n[i]
			known[f.Offset+i] |= at[i]
		}
	}
	for _, b := range known {
		if b != 0xff {
			return nil, false
		}
	}
	return key, true
}

func putAll(b []byte) {
	for i := range b {
		b[i] = 0xff
	}
}
