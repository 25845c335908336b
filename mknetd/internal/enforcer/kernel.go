package enforcer

import (
	"net/netip"

	"mknet/mknetd/internal/classifier"
)

// Kernel is the policy maps. Each method is one change of one map, done whole or
// not at all. Deleting what is absent is success.
type Kernel interface {
	// InsertTable makes an inner map with the table and puts it under the generation
	// into the outer map of the class. A generation is never used twice.
	InsertTable(c classifier.Class, generation uint32, table []byte) error
	// ReadTable returns the table as the programs have left it: with their counts.
	ReadTable(c classifier.Class, generation uint32) ([]byte, error)
	// HasTable asks for the same without reading it.
	HasTable(c classifier.Class, generation uint32) (bool, error)
	DeleteTable(c classifier.Class, generation uint32) error
	// Tables lists the generations of a class.
	Tables(c classifier.Class) ([]uint32, error)

	// SetSlot writes one slot in one 8-byte store; the zero Slot empties it.
	SetSlot(index uint32, s Slot) error
	ReadSlot(index uint32) (Slot, error)
	// Slots returns all that are not zero.
	Slots() (map[uint32]Slot, error)

	PutPoint(a netip.Addr, p Point) error
	DeletePoint(a netip.Addr) error
	Points() (map[netip.Addr]Point, error)
	// ReadPoint returns the value as it stands, nil where there is none.
	ReadPoint(a netip.Addr) ([]byte, error)

	PutIdentity(a netip.Addr, id Identity) error
	DeleteIdentity(a netip.Addr) error
	Identities() (map[netip.Addr]Identity, error)
	// ReadIdentity returns the value as it stands, nil where there is none.
	ReadIdentity(a netip.Addr) ([]byte, error)

	// Barrier returns once no program runs that began before the call.
	Barrier() error
}
