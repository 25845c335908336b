package classifier

import "mknet/spec/policy"

// Class is a size of tables. Each is a map of its own in the kernel, because the
// inner maps of one outer map have one value size.
type Class uint8

// The classes.
const (
	Small Class = iota
	Medium
	Large
)

// Classes is all of them, the smallest first.
var Classes = [3]Class{Small, Medium, Large}

func (c Class) String() string { return [...]string{"small", "medium", "large"}[c] }

// Dimensions bounds what a class holds.
type Dimensions struct {
	Words      int // W: 64 rules each
	Intervals  int // A: of addresses, and of ports
	Rows       int // S: of addresses, and of ports
	References int // R
}

var dimensions = [...]Dimensions{
	Small:  {Words: 1, Intervals: 256, Rows: 128, References: 16},
	Medium: {Words: 4, Intervals: 1024, Rows: 512, References: 64},
	Large:  {Words: policy.MaxRules / 64, Intervals: policy.MaxAddressBounds, Rows: policy.MaxAddressSets, References: policy.MaxReferences},
}

// Dimensions returns the bounds of the class.
func (c Class) Dimensions() Dimensions { return dimensions[c] }

// Fits reports whether a direction of that size fits.
func (d Dimensions) Fits(s policy.Size) bool {
	return s.Rules <= 64*d.Words && max(s.AddressBounds, s.PortBounds) <= d.Intervals &&
		max(s.AddressSets, s.PortSets) <= d.Rows && s.References <= d.References
}

// ClassOf returns the smallest class that holds a direction of that size; false
// where none does.
func ClassOf(s policy.Size) (Class, bool) {
	for _, c := range Classes {
		if c.Dimensions().Fits(s) {
			return c, true
		}
	}
	return 0, false
}

// Layout is where the parts of a table begin, in bytes. The C side has the same
// as a struct for each class; see the package comment.
type Layout struct {
	Allow, AddrStart, PortStart, AddrSet, PortSet, AddrBits, PortBits, RefGroup, RefBits, Hits int

	Bytes int // of the whole table: the value size of the class's maps
}

const headerBytes = 64

// Layout returns the layout of the class.
func (c Class) Layout() Layout {
	d := c.Dimensions()
	var l Layout
	at := headerBytes
	for _, part := range []struct {
		begin *int
		bytes int
	}{
		{&l.Allow, 8 * d.Words},
		{&l.AddrStart, 4 * d.Intervals},
		{&l.PortStart, 4 * d.Intervals},
		{&l.AddrSet, 4 * d.Intervals},
		{&l.PortSet, 4 * d.Intervals},
		{&l.AddrBits, 8 * d.Words * d.Rows},
		{&l.PortBits, 8 * d.Words * d.Rows},
		{&l.RefGroup, 4 * d.References},
		{&l.RefBits, 8 * d.Words * d.References},
		{&l.Hits, 8 * 64 * d.Words},
	} {
		*part.begin = at
		at += part.bytes
	}
	l.Bytes = at
	return l
}
