package mapdump

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Request says what to read.
type Request struct {
	Map     string
	Filters []string // FIELD=VALUE; an entry must match all of them
	Limit   int      // at most so many entries; 0: all
	Inner   *uint32  // the rules of this generation of a map of tables
}

// Dump is what was read.
type Dump struct {
	Map     string `json:"map"`
	Entries []Row  `json:"entries"`
	// Lookups and Read are how the map was read: by key so often, and so many
	// entries one after the other.
	Lookups int  `json:"lookups"`
	Read    int  `json:"read"`
	Limited bool `json:"limited"` // Limit was reached, and not all has been read

	of Map
}

// Row is one entry, or a part of one.
type Row struct {
	of    *Map
	cells []cell
}

// MarshalJSON writes an object in the order of the fields.
func (r Row) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	for i, f := range r.of.Fields {
		if f.hidden {
			continue
		}
		value, err := json.Marshal(f.plain(r.cells[i]))
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, ",%q:%s", f.Name, value)
	}
	return append(append([]byte{'{'}, bytes.TrimPrefix(b.Bytes(), []byte{','})...), '}'), nil
}

// Table writes lines with tabs between the columns.
func (d Dump) Table(w io.Writer) {
	fmt.Fprintln(w, strings.ToUpper(strings.Join(d.of.Names(), "\t")))
	for _, r := range d.Entries {
		var line []string
		for i, f := range d.of.Fields {
			if !f.hidden {
				line = append(line, f.show(r.cells[i]))
			}
		}
		fmt.Fprintln(w, strings.Join(line, "\t"))
	}
}

// Read reads a map whose pin is in dir. What names nothing is a *UsageError, a map
// that is not pinned an *AbsentError.
func Read(dir string, req Request) (Dump, error) {
	m, err := find(req.Map)
	if err != nil {
		return Dump{}, err
	}
	if err := m.check(req); err != nil {
		return Dump{}, err
	}
	from, err := m.open(dir)
	if err != nil {
		return Dump{}, err
	}
	defer from.Close()
	d, err := m.read(from, req)
	if err != nil {
		return Dump{}, fmt.Errorf("map %s: %w", m.Name, err)
	}
	return d, nil
}

// check finds what is wrong with a question whatever the map holds.
func (m Map) check(req Request) error {
	if m.ring {
		return usage("map %s: is a buffer that only its reader sees into: see mknetd trace", m.Name)
	}
	if req.Limit < 0 {
		return usage("limit %d: must not be negative", req.Limit)
	}
	if req.Inner == nil {
		_, err := m.parseFilters(req.Filters)
		return err
	}
	if !m.tables {
		var names []string
		for _, m := range all {
			if m.tables {
				names = append(names, m.Name)
			}
		}
		return usage("map %s has no inner maps; %s have", m.Name, strings.Join(names, ", "))
	}
	_, err := inner.parseFilters(req.Filters)
	return err
}

func (m Map) read(from source, req Request) (Dump, error) {
	if req.Inner != nil {
		return m.readInner(from, req)
	}
	filters, err := m.parseFilters(req.Filters)
	if err != nil {
		return Dump{}, err
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return Dump{}, fmt.Errorf("read the clock: %w", err)
	}
	r := reading{m: m, from: from, filters: filters, limit: req.Limit, now: time.Duration(ts.Nano())}
	r.out = Dump{Map: m.Name, Entries: []Row{}, of: m}
	if key, ok := m.key(filters); ok {
		value, err := from.lookup(key)
		r.out.Lookups++
		if err != nil || value == nil {
			return r.out, err
		}
		r.entry(key, value)
		return r.out, r.err
	}
	err = from.each(func(key, value []byte) bool {
		r.out.Read++
		return r.entry(key, value)
	})
	if r.err != nil {
		err = r.err
	}
	return r.out, err
}

// reading is one Read at work.
type reading struct {
	m       Map
	from    source
	filters []filter
	limit   int
	now     time.Duration // CLOCK_MONOTONIC
	cells   []cell        // of the row at hand; kept rows have their own
	out     Dump
	err     error
}

// entry adds the rows of one entry, and reports whether more are wanted.
func (r *reading) entry(key, value []byte) bool {
	if r.m.tables {
		table, err := r.from.table(value)
		if r.err = err; err != nil {
			return false
		}
		if table == nil {
			return true // it was replaced just now
		}
		return r.row(key, value, table, 0)
	}
	switch r.m.perCPU {
	case summed:
		value = sum(value, align(r.m.ValueBytes))
	case separate:
		for i, size := 0, align(r.m.ValueBytes); (i+1)*size <= len(value); i++ {
			if !r.row(key, value[i*size:][:r.m.ValueBytes], nil, i) {
				return false
			}
		}
		return true
	}
	if r.m.rows == 0 {
		return r.row(key, value, nil, 0)
	}
	for i := range r.m.rows {
		if !r.row(key, value, value[i*r.m.stride:][:r.m.stride], i) {
			return false
		}
	}
	return true
}

func (r *reading) row(key, value, part []byte, index int) bool {
	if r.m.sparse {
		of := value
		if part != nil {
			of = part
		}
		if len(bytes.Trim(of, "\x00")) == 0 {
			return true
		}
	}
	if r.cells == nil {
		r.cells = make([]cell, len(r.m.Fields))
	}
	cells := r.cells
	for i := range r.m.Fields {
		f := &r.m.Fields[i]
		switch f.Part {
		case InKey:
			cells[i] = f.read(key, r.now)
		case InValue:
			cells[i] = f.read(value, r.now)
		case InRow:
			cells[i] = f.read(part, r.now)
		case InIndex:
			cells[i].n = uint64(index)
		}
	}
	return r.out.add(&r.m, r.filters, r.limit, cells)
}

// add adds a copy of a row that all filters want, and reports whether there is room
// for more. Most rows of a long map are not wanted.
func (d *Dump) add(m *Map, filters []filter, limit int, cells []cell) bool {
	for _, f := range filters {
		if !f.matches(*m, cells) {
			return true
		}
	}
	if limit > 0 && len(d.Entries) == limit {
		d.Limited = true
		return false
	}
	d.Entries = append(d.Entries, Row{m, slices.Clone(cells)})
	return true
}

// align is the distance of the CPUs' values (include/linux/bpf.h: round_up by 8).
func align(n int) int { return (n + 7) &^ 7 }

// sum adds up the words of all CPUs' values.
func sum(all []byte, size int) []byte {
	out := make([]byte, size)
	for ; len(all) >= size; all = all[size:] {
		for i := 0; i+8 <= size; i += 8 {
			le := binary.LittleEndian
			le.PutUint64(out[i:], le.Uint64(out[i:])+le.Uint64(all[i:]))
		}
	}
	return out
}
