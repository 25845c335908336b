package policy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// reader walks one document and keeps every fault with its path, so that an
// operator mends a document once.
type reader struct {
	*Error
	document string
	before   int  // faults of earlier documents
	restore  bool // sizes do not matter
}

func (r *reader) fault(path, format string, args ...any) { r.add(r.document, path, format, args...) }

// object returns the fields of v. A field that is not in known is a fault, and so
// is null: an empty value of a template must not come to mean "every peer".
func (r *reader) object(path string, v any, known ...string) map[string]any {
	m, ok := v.(map[string]any)
	if !ok {
		r.fault(path, "is %s, want an object with %s", describe(v), strings.Join(known, ", "))
		return nil
	}
	for _, name := range sortedKeys(m) {
		switch at := join(path, name); {
		case !slices.Contains(known, name):
			r.fault(at, "is not a field here (known: %s)", strings.Join(known, ", "))
		case m[name] == nil:
			r.fault(at, "is null: leave it out or give it a value")
			delete(m, name)
		}
	}
	return m
}

// list returns the items of an optional list.
func (r *reader) list(path string, m map[string]any, name string) []any {
	v, ok := m[name]
	if !ok {
		return nil
	}
	l, ok := v.([]any)
	if !ok {
		r.fault(join(path, name), "is %s, want a list", describe(v))
	}
	return l
}

// text returns a string; absent is a fault only where it is required.
func (r *reader) text(path string, m map[string]any, name string, required bool) (string, bool) {
	v, ok := m[name]
	if !ok {
		if required && m != nil {
			r.fault(join(path, name), "is missing")
		}
		return "", false
	}
	s, ok := v.(string)
	if !ok {
		r.fault(join(path, name), "is %s, want a string in quotes", describe(v))
	}
	return s, ok
}

// number returns a required whole number from lo to hi.
func (r *reader) number(path string, m map[string]any, name string, lo, hi int) int {
	v, ok := m[name]
	if !ok {
		if m != nil {
			r.fault(join(path, name), "is missing, want a number from %d to %d", lo, hi)
		}
		return lo
	}
	if n, ok := v.(json.Number); ok {
		if i, err := strconv.Atoi(n.String()); err == nil && i >= lo && i <= hi {
			return i
		}
	}
	r.fault(join(path, name), "is %s, want a whole number from %d to %d", describe(v), lo, hi)
	return lo
}

// oneOf returns a string out of a few.
func (r *reader) oneOf(path string, m map[string]any, name string, required bool, values ...string) string {
	s, ok := r.text(path, m, name, required)
	if ok && !slices.Contains(values, s) {
		r.fault(join(path, name), "is %q, want %s", clip(s), strings.Join(values, " or "))
	}
	return s
}

// name returns a required name of a document.
func (r *reader) name(path string, m map[string]any, name string) string {
	s, ok := r.text(path, m, name, true)
	if ok && !validName(s) {
		r.fault(join(path, name), "is %q, must be 1 to %d of a-z, 0-9, '-' and '.', with a letter or digit at both ends", clip(s), maxNameBytes)
	}
	return s
}

// maxNameBytes is that of a DNS label (RFC 1035 section 2.3.4).
const maxNameBytes = 63

func validName(s string) bool {
	if s == "" || len(s) > maxNameBytes {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case (c == '-' || c == '.') && i > 0 && i < len(s)-1:
		default:
			return false
		}
	}
	return true
}

// ref reads {name: x}.
func (r *reader) ref(path string, v any) Ref {
	return Ref{Name: r.name(path, r.object(path, v, "name"), "name")}
}

// prefix reads a canonical IPv4 prefix.
func (r *reader) prefix(path string, v any) netip.Prefix {
	s, ok := v.(string)
	if !ok {
		r.fault(path, "is %s, want an IPv4 prefix such as \"10.0.0.0/8\"", describe(v))
		return netip.Prefix{}
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		if a, err := netip.ParseAddr(s); err == nil && a.Is4() {
			r.fault(path, "is an address, want a prefix: %q", s+"/32")
		} else {
			r.fault(path, "is %q, want an IPv4 prefix such as \"10.0.0.0/8\"", clip(s))
		}
	case !p.Addr().Is4():
		r.fault(path, "is %s: only IPv4 is supported", p)
	case p != p.Masked():
		r.fault(path, "is %s, which has bits set behind its length: did you mean %s", p, p.Masked())
	}
	return p
}

func (r *reader) optionalPrefix(path string, m map[string]any, name string) netip.Prefix {
	if v, ok := m[name]; ok {
		return r.prefix(join(path, name), v)
	}
	return netip.Prefix{}
}

// protocol reads a name or a number; absent means AnyProtocol.
func (r *reader) protocol(path string, m map[string]any) Protocol {
	const want = "want all, icmp, tcp, udp, sctp, gre, esp, ah or a number from 0 to 255"
	v, ok := m["protocol"]
	if !ok {
		return AnyProtocol
	}
	var s string
	switch v := v.(type) {
	case string:
		s = v
	case json.Number:
		s = v.String()
	default:
		r.fault(join(path, "protocol"), "is %s, %s", describe(v), want)
		return AnyProtocol
	}
	p, ok := ParseProtocol(s)
	if !ok {
		r.fault(join(path, "protocol"), "is %q, %s", clip(s), want)
	}
	return p
}

// ports reads a list of port and portRange, which only some protocols may have.
func (r *reader) ports(path string, m map[string]any, p Protocol) []PortRange {
	items := r.list(path, m, "ports")
	if len(items) > 0 && !p.HasPorts() {
		r.fault(join(path, "ports"), "need protocol tcp, udp or sctp, and this is %s", p)
	}
	var out []PortRange
	for i, item := range items {
		at := index(join(path, "ports"), i)
		f := r.object(at, item, "port", "portRange")
		if f == nil {
			continue
		}
		_, single := f["port"]
		bounds, ranged := f["portRange"]
		switch {
		case single == ranged:
			r.fault(at, "needs exactly one of port and portRange")
		case single:
			n := r.number(at, f, "port", 1, 65535)
			out = append(out, PortRange{uint16(n), uint16(n)})
		default:
			at = join(at, "portRange")
			b := r.object(at, bounds, "from", "to")
			from, to := r.number(at, b, "from", 1, 65535), r.number(at, b, "to", 1, 65535)
			if from > to && b["from"] != nil && b["to"] != nil {
				r.fault(at, "goes from %d down to %d", from, to)
			}
			out = append(out, PortRange{uint16(from), uint16(to)})
		}
	}
	return out
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case string:
		return strconv.Quote(clip(v))
	case json.Number:
		return clip(v.String())
	case bool:
		return strconv.FormatBool(v)
	case []any:
		return "a list"
	}
	return "an object"
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
