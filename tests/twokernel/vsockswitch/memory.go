package vsockswitch

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// maxRegions bounds a memory table; VHOST_MEMORY_BASELINE_NREGIONS of the
// vhost-user specification.
const maxRegions = 8

// maxRegionBytes bounds one region, so that a wrong size is an error here and not
// a mapping of the whole address space.
const maxRegionBytes = 64 << 30

// region is one piece of guest memory.
type region struct {
	guest, user uint64 // where the guest and where QEMU see its first byte
	bytes       []byte // from that byte on
	mapping     []byte // what munmap wants
}

// memory is a guest's memory table. It is immutable; a new table makes a new one.
type memory struct{ regions []region }

// regionEntry is one entry of a VHOST_USER_SET_MEM_TABLE message.
type regionEntry struct{ guest, size, user, offset uint64 }

// mapMemory maps the regions. It does not take ownership of the files.
func mapMemory(entries []regionEntry, files []*os.File) (*memory, error) {
	if len(entries) > maxRegions || len(entries) != len(files) {
		return nil, fmt.Errorf("memory table of %d regions with %d descriptors, the limit is %d", len(entries), len(files), maxRegions)
	}
	m := &memory{}
	for i, e := range entries {
		if e.size == 0 || e.size > maxRegionBytes || e.offset > maxRegionBytes {
			return nil, errors.Join(fmt.Errorf("memory region %d of %d bytes at %d", i, e.size, e.offset), m.unmap())
		}
		mapping, err := mapFile(files[i], e.size+e.offset)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("map memory region %d: %w", i, err), m.unmap())
		}
		m.regions = append(m.regions, region{guest: e.guest, user: e.user, bytes: mapping[e.offset:], mapping: mapping})
	}
	return m, nil
}

// mapFile maps the first size bytes of a file, which must have them: touching a
// page behind its end would be a SIGBUS.
func mapFile(f *os.File, size uint64) (mapping []byte, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if uint64(info.Size()) < size {
		return nil, fmt.Errorf("the file has %d bytes, not %d", info.Size(), size)
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) {
		mapping, err = unix.Mmap(int(fd), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}); e != nil {
		return nil, e
	}
	return mapping, err
}

// unmap gives the mappings back. Nothing may use the memory any more.
func (m *memory) unmap() error {
	if m == nil {
		return nil
	}
	var errs []error
	for _, r := range m.regions {
		errs = append(errs, unix.Munmap(r.mapping))
	}
	m.regions = nil
	return errors.Join(errs...)
}

// atGuest returns n bytes at a guest-physical address.
func (m *memory) atGuest(address, n uint64) ([]byte, error) {
	for _, r := range m.regions {
		if b := r.slice(address, r.guest, n); b != nil {
			return b, nil
		}
	}
	return nil, fmt.Errorf("guest address %#x+%d lies outside its memory", address, n)
}

// atUser returns n bytes at an address in QEMU.
func (m *memory) atUser(address, n uint64) ([]byte, error) {
	for _, r := range m.regions {
		if b := r.slice(address, r.user, n); b != nil {
			return b, nil
		}
	}
	return nil, fmt.Errorf("front-end address %#x+%d lies outside the memory table", address, n)
}

// slice returns n bytes at address when the region, seen as starting at base, has
// them; the capacity ends with them.
func (r *region) slice(address, base, n uint64) []byte {
	size := uint64(len(r.bytes))
	if address < base || address-base >= size || n > size-(address-base) {
		return nil
	}
	o := address - base
	return r.bytes[o : o+n : o+n]
}
