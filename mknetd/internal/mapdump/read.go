package mapdump

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
)

// AbsentError says that a map is not pinned.
type AbsentError struct {
	Map, Dir string
	NoDir    bool // nothing at all is pinned
}

func (e *AbsentError) Error() string {
	if e.NoDir {
		return fmt.Sprintf("map %s: nothing is pinned in %s: no mknetd with this stateDir has had an ordinary pod or a policy since the node started (see keys stateDir and pools)", e.Map, e.Dir)
	}
	return fmt.Sprintf("map %s: is not in %s: the mknetd that pinned there is an older one", e.Map, e.Dir)
}

// source is a map to read. Values of maps per CPU are those of all CPUs, one after
// the other.
type source interface {
	// lookup returns nil where there is no such key.
	lookup(key []byte) ([]byte, error)
	// each calls f until it returns false.
	each(f func(key, value []byte) bool) error
	// table returns the table that the value of a map of maps names, nil where it
	// is gone.
	table(value []byte) ([]byte, error)
	Close() error
}

// open opens the map's pin in dir.
func (m Map) open(dir string) (source, error) {
	path := filepath.Join(dir, m.Name)
	have, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	switch {
	case errors.Is(err, os.ErrNotExist):
		_, gone := os.Stat(dir)
		return nil, &AbsentError{Map: m.Name, Dir: dir, NoDir: gone != nil}
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("map %s: open %s: %w (only root may, with CAP_BPF or CAP_SYS_ADMIN)", m.Name, path, err)
	case err != nil:
		return nil, fmt.Errorf("map %s: open %s: %w", m.Name, path, err)
	}
	if int(have.KeySize()) != m.KeyBytes || int(have.ValueSize()) != m.ValueBytes || !slices.Contains(m.kernelTypes(), have.Type()) {
		have.Close()
		return nil, fmt.Errorf("map %s: %s is %s with keys of %d and values of %d bytes, this mknetd knows keys of %d and values of %d: use the mknetd that pinned it",
			m.Name, path, have.Type(), have.KeySize(), have.ValueSize(), m.KeyBytes, m.ValueBytes)
	}
	return &kernelMap{have, m.batch}, nil
}

// kernelMap is a pinned map.
type kernelMap struct {
	*ebpf.Map
	batch bool
}

func (k *kernelMap) lookup(key []byte) ([]byte, error) { return k.LookupBytes(key) }

// batchSize is how many entries are read at a time; a bucket has fewer.
const batchSize = 4096

func (k *kernelMap) each(f func(key, value []byte) bool) error {
	if k.batch {
		return k.eachBatch(f)
	}
	key, err := k.NextKeyBytes(nil)
	for range k.MaxEntries() { // who deletes under us could send us back to the first for ever
		if err != nil || key == nil {
			return err
		}
		value, err := k.LookupBytes(key)
		if err != nil {
			return err
		}
		if value != nil && !f(key, value) {
			return nil
		}
		if key, err = k.NextKeyBytes(key); err != nil {
			return err
		}
	}
	return err
}

// eachBatch also is right where entries come and go meanwhile: each bucket is read
// under its lock.
func (k *kernelMap) eachBatch(f func(key, value []byte) bool) error {
	n := int(min(batchSize, k.MaxEntries()))
	array := func(bytes uint32) reflect.Value {
		return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(bytes), reflect.TypeFor[byte]())), n, n)
	}
	keys, values := array(k.KeySize()), array(k.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		got, err := k.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return err
		}
		for i := range got {
			if !f(keys.Index(i).Bytes(), values.Index(i).Bytes()) {
				return nil
			}
		}
		if last {
			return nil
		}
	}
}

func (k *kernelMap) table(value []byte) ([]byte, error) {
	m, err := ebpf.NewMapFromID(ebpf.MapID(word(value, false)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.LookupBytes(uint32(0))
}
