package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
)

// The file format of bbolt, version 2 (its internal/common: page.go, meta.go,
// bucket.go), as far as is needed to follow every pointer. Integers have the
// machine's byte order.
const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2

	pageHeader   = 16 // id uint64, flags uint16, count uint16, overflow uint32
	pageElement  = 16 // branch: pos, ksize uint32, pgid uint64; leaf: flags, pos, ksize, vsize uint32
	bucketHeader = 16 // root pgid uint64, sequence uint64
	metaBytes    = 64 // the last 8 are the checksum, FNV-64a of those before

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10

	leafIsBucket = 0x01

	// A tree of 2^18 records with two keys a page would be 18 deep.
	maxDepth = 40
)

var order = binary.NativeEndian

// verifyPages proves that bbolt can follow every pointer of the file: both
// headers intact, every page inside the file, of the right kind, referenced
// once, its keys and values inside it and in order, and every other page free.
// A *CorruptError names the page.
//
// Both headers must be intact although bbolt would go on with one: it would fall
// back to the older, and an acknowledged write would be gone without a word. A
// header is 64 bytes at the start of a page, so that a torn write cannot explain
// a damaged one.
func verifyPages(f *os.File, path string) error {
	w, err := newWalker(f, path)
	if err != nil {
		return err
	}
	return w.walk()
}

func newWalker(f *os.File, path string) (*walker, error) {
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", path, err)
	}
	return &walker{file: f, path: path, size: fi.Size(), used: map[uint64]bool{0: true, 1: true}}, nil
}

func (w *walker) walk() error {
	switch {
	case w.size == 0:
		return w.fault(-1, "is empty; a crash of mknetd does not leave it so")
	case w.size > MaxFileBytes:
		return w.fault(-1, "has %d bytes, at most %d are expected", w.size, int64(MaxFileBytes))
	}
	m, err := w.metas()
	if err != nil {
		return err
	}
	w.limit, w.pageSize, w.txid = m.pages, int64(m.pageSize), m.txid
	if int64(m.pages) > w.size/w.pageSize {
		if err := w.note(w.fault(w.size, "is truncated: has %d bytes, its header counts %d pages of %d", w.size, m.pages, m.pageSize)); err != nil {
			return err
		}
		w.limit = uint64(w.size / w.pageSize)
	}
	if err := w.note(w.freelist(m.freelist)); err != nil {
		return err
	}
	if err := w.note(w.tree(m.root, nil, nil, 0)); err != nil {
		return err
	}
	if len(w.faults) > 0 {
		return nil // what is left over then hangs from a page that could not be read
	}
	for id := range w.limit {
		if !w.used[id] && !w.free[id] {
			if err := w.note(w.fault(w.at(id), "page %d is neither used nor free", id)); err != nil {
				return err
			}
		}
	}
	return nil
}

// walker follows every pointer of a file. With collect set it notes what is wrong
// and goes on with what can still be reached.
type walker struct {
	file     *os.File
	path     string
	size     int64
	pageSize int64
	txid     uint64          // of the header in use
	limit    uint64          // pages below it exist
	used     map[uint64]bool // by the tree, the freelist or a header
	free     map[uint64]bool // nil when the list could not be read

	collect bool
	faults  []*CorruptError
	halved  bool // one header was damaged
	// visit, where set, gets every value: the names of the buckets that lead to it,
	// and the page's offset. It must not keep any of them.
	visit   func(buckets []string, key, value []byte, offset int64)
	buckets []string
}

// note keeps a fault and returns nil where faults are collected; any other error
// is returned.
func (w *walker) note(err error) error {
	var corrupt *CorruptError
	if !w.collect || !errors.As(err, &corrupt) {
		return err
	}
	w.faults = append(w.faults, corrupt)
	return nil
}

type meta struct {
	pageSize              uint32
	root, freelist, pages uint64
	txid                  uint64
}

func (w *walker) fault(offset int64, format string, args ...any) error {
	return &CorruptError{Path: w.path, Offset: offset, Why: fmt.Sprintf(format, args...)}
}

func (w *walker) at(page uint64) int64 { return int64(page) * w.pageSize }

func (w *walker) read(offset int64, n int) ([]byte, error) {
	b := make([]byte, n)
	if _, err := w.file.ReadAt(b, offset); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, w.fault(offset, "ends within a page")
		}
		return nil, fmt.Errorf("store %s: %w", w.path, err)
	}
	return b, nil
}

// metas reads both headers and returns the current one.
func (w *walker) metas() (meta, error) {
	first, err := w.meta(0)
	if err := w.note(err); err != nil {
		return meta{}, err
	}
	at := int64(first.pageSize)
	if at == 0 {
		at = w.secondMeta()
	}
	second, err := w.meta(at)
	if err := w.note(err); err != nil {
		return meta{}, err
	}
	switch {
	case first.pageSize == 0 && second.pageSize == 0:
		return meta{}, w.fault(0, "has no intact header: nothing says where its records are")
	case first.pageSize == 0 || second.pageSize == 0:
		// Only while collecting. The other header may have been the newer one.
		w.halved = true
		return meta{}.newer(first).newer(second), nil
	case first.pageSize != second.pageSize:
		return meta{}, w.fault(0, "headers disagree on the size of a page")
	}
	return first.newer(second), nil
}

func (m meta) newer(o meta) meta {
	if o.pageSize != 0 && (m.pageSize == 0 || o.txid > m.txid) {
		return o
	}
	return m
}

// secondMeta finds the second header without knowing the size of a page.
func (w *walker) secondMeta() int64 {
	for at := int64(1024); at <= 1<<16; at *= 2 {
		if m, err := w.meta(at); err == nil && int64(m.pageSize) == at {
			return at
		}
	}
	return int64(os.Getpagesize())
}

func (w *walker) meta(offset int64) (meta, error) {
	b, err := w.read(offset, pageHeader+metaBytes)
	if err != nil {
		return meta{}, err
	}
	flags, b := order.Uint16(b[8:]), b[pageHeader:]
	sum := fnv.New64a()
	_, _ = sum.Write(b[:metaBytes-8])
	m := meta{pageSize: order.Uint32(b[8:]), root: order.Uint64(b[16:]), freelist: order.Uint64(b[32:]), pages: order.Uint64(b[40:]), txid: order.Uint64(b[48:])}
	switch {
	case order.Uint32(b) != boltMagic:
		return meta{}, w.fault(offset, "is not a store: header begins with %08x", order.Uint32(b))
	case order.Uint32(b[4:]) != boltVersion:
		return meta{}, w.fault(offset, "header has format version %d, want %d", order.Uint32(b[4:]), boltVersion)
	case order.Uint64(b[56:]) != sum.Sum64(), flags != flagMeta:
		return meta{}, w.fault(offset, "header has a wrong checksum")
	case m.pageSize < 1024 || m.pageSize > 1<<20 || m.pageSize&(m.pageSize-1) != 0:
		return meta{}, w.fault(offset, "header has a page size of %d", m.pageSize)
	case m.pages < 4:
		return meta{}, w.fault(offset, "header counts %d pages", m.pages)
	}
	return m, nil
}

// page is one page with what overflows into the following ones.
type page struct {
	flags, count uint16
	data         []byte // header included
}

// load reads a page, checks that it is where a pointer may lead and marks it as
// used.
func (w *walker) load(id uint64) (page, error) {
	if id < 2 || id >= w.limit {
		return page{}, w.fault(-1, "a pointer leads to page %d of %d", id, w.limit)
	}
	head, err := w.read(w.at(id), pageHeader)
	if err != nil {
		return page{}, err
	}
	overflow := uint64(order.Uint32(head[12:]))
	if got := order.Uint64(head); got != id || overflow >= w.limit-id {
		return page{}, w.fault(w.at(id), "page %d calls itself %d and overflows into %d more of %d", id, got, overflow, w.limit)
	}
	for i := id; i <= id+overflow; i++ {
		if w.used[i] || w.free[i] {
			return page{}, w.fault(w.at(id), "page %d is used twice, or free as well", i)
		}
		w.used[i] = true
	}
	data, err := w.read(w.at(id), int((overflow+1)*uint64(w.pageSize)))
	return page{flags: order.Uint16(head[8:]), count: order.Uint16(head[10:]), data: data}, err
}

func (w *walker) freelist(id uint64) error {
	p, err := w.load(id)
	if err != nil {
		return err
	}
	if p.flags != flagFreelist {
		return w.fault(w.at(id), "page %d has flags %#x, want the list of free pages", id, p.flags)
	}
	n, body := uint64(p.count), p.data[pageHeader:]
	if p.count == 0xFFFF { // then the first element is the count
		n, body = order.Uint64(body), body[8:]
	}
	if n > uint64(len(body)/8) {
		return w.fault(w.at(id), "list of free pages counts %d, has room for %d", n, len(body)/8)
	}
	free := make(map[uint64]bool, n)
	for i := range n {
		page := order.Uint64(body[8*i:])
		if page < 2 || page >= w.limit || free[page] || w.used[page] {
			return w.fault(w.at(id), "list of free pages names page %d of %d wrongly", page, w.limit)
		}
		free[page] = true
	}
	w.free = free
	return nil
}

// tree walks the pages of one bucket. Its keys are in [low, high); nil is open.
func (w *walker) tree(id uint64, low, high []byte, depth int) error {
	if depth > maxDepth {
		return w.fault(-1, "the tree is deeper than %d pages", maxDepth)
	}
	p, err := w.load(id)
	if err != nil {
		return err
	}
	return w.elements(p, w.at(id), low, high, depth)
}

func (w *walker) elements(p page, offset int64, low, high []byte, depth int) error {
	if p.flags != flagBranch && p.flags != flagLeaf {
		return w.fault(offset, "page has flags %#x, want a branch or a leaf", p.flags)
	}
	if p.flags == flagBranch && p.count == 0 || pageHeader+int(p.count)*pageElement > len(p.data) {
		return w.fault(offset, "page has %d elements in %d bytes", p.count, len(p.data))
	}
	keys := make([][]byte, 0, int(p.count)+1)
	bad := make([]bool, p.count)
	for i := range int(p.count) {
		key, _, err := w.element(p, offset, i)
		if err != nil {
			if err := w.note(err); err != nil {
				return err
			}
			bad[i], key = true, low
		}
		before, strict := low, false
		if i > 0 {
			before, strict = keys[i-1], !bad[i-1]
		}
		if c := bytes.Compare(before, key); !bad[i] && (before != nil && (c > 0 || strict && c == 0) || high != nil && bytes.Compare(key, high) >= 0) {
			if err := w.note(w.fault(offset, "keys are not in order")); err != nil {
				return err
			}
		}
		keys = append(keys, key)
	}
	keys = append(keys, high)
	for i := range int(p.count) {
		if bad[i] {
			continue
		}
		if err := w.note(w.descend(p, offset, i, keys[i], keys[i+1], depth)); err != nil {
			return err
		}
	}
	return nil
}

// element returns key and value of the i-th element; a branch has no values.
func (w *walker) element(p page, offset int64, i int) (key, value []byte, err error) {
	at := pageHeader + i*pageElement
	e := p.data[at:]
	var pos, ksize, vsize uint64
	if p.flags == flagBranch {
		pos, ksize = uint64(order.Uint32(e)), uint64(order.Uint32(e[4:]))
	} else {
		if flags := order.Uint32(e); flags != 0 && flags != leafIsBucket {
			return nil, nil, w.fault(offset, "element %d has flags %#x", i, flags)
		}
		pos, ksize, vsize = uint64(order.Uint32(e[4:])), uint64(order.Uint32(e[8:])), uint64(order.Uint32(e[12:]))
	}
	start := uint64(at) + pos
	if first := uint64(pageHeader + int(p.count)*pageElement); start < first || start+ksize+vsize > uint64(len(p.data)) {
		return nil, nil, w.fault(offset, "element %d lies outside its page", i)
	}
	return p.data[start : start+ksize], p.data[start+ksize : start+ksize+vsize], nil
}

// descend follows the i-th element where it leads to further pages.
func (w *walker) descend(p page, offset int64, i int, low, high []byte, depth int) error {
	e := p.data[pageHeader+i*pageElement:]
	if p.flags == flagBranch {
		return w.tree(order.Uint64(e[8:]), low, high, depth+1)
	}
	key, value, err := w.element(p, offset, i)
	if err != nil {
		return err
	}
	if order.Uint32(e) != leafIsBucket {
		if w.visit != nil {
			w.visit(w.buckets, key, value, offset)
		}
		return nil
	}
	if len(value) < bucketHeader {
		return w.fault(offset, "bucket %q has a header of %d bytes", printable(low), len(value))
	}
	w.buckets = append(w.buckets, string(key))
	defer func() { w.buckets = w.buckets[:len(w.buckets)-1] }()
	if root := order.Uint64(value); root != 0 {
		return w.tree(root, nil, nil, depth+1)
	}
	// A small bucket lies inside its element, as a page of its own.
	inline := value[bucketHeader:]
	if len(inline) < pageHeader {
		return w.fault(offset, "bucket %q has a page of %d bytes", printable(low), len(inline))
	}
	if depth >= maxDepth {
		return w.fault(offset, "the tree is deeper than %d pages", maxDepth)
	}
	sub := page{flags: order.Uint16(inline[8:]), count: order.Uint16(inline[10:]), data: inline}
	if sub.flags != flagLeaf {
		return w.fault(offset, "bucket %q has an inline page with flags %#x", printable(low), sub.flags)
	}
	return w.elements(sub, offset, nil, nil, depth+1)
}
