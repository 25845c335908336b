package enforcer

import (
	"net/netip"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/crash"
)

var policyWritten = crash.New("enforcer.policy-written")

// marked is a Kernel with a crash point after every change of a map.
type marked struct{ Kernel }

func after(step string, err error) error {
	if err == nil {
		policyWritten.At(step)
	}
	return err
}

func (k marked) InsertTable(c classifier.Class, generation uint32, table []byte) error {
	return after("table-inserted", k.Kernel.InsertTable(c, generation, table))
}

func (k marked) DeleteTable(c classifier.Class, generation uint32) error {
	return after("table-deleted", k.Kernel.DeleteTable(c, generation))
}

func (k marked) SetSlot(index uint32, s Slot) error {
	return after("slot-set", k.Kernel.SetSlot(index, s))
}

func (k marked) PutPoint(a netip.Addr, p Point) error {
	return after("point-put", k.Kernel.PutPoint(a, p))
}

func (k marked) DeletePoint(a netip.Addr) error {
	return after("point-deleted", k.Kernel.DeletePoint(a))
}

func (k marked) PutIdentity(a netip.Addr, id Identity) error {
	return after("identity-put", k.Kernel.PutIdentity(a, id))
}

func (k marked) DeleteIdentity(a netip.Addr) error {
	return after("identity-deleted", k.Kernel.DeleteIdentity(a))
}
