package datapath

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
)

// state is what a program that was found on a hook is to us.
type state int

const (
	foreign state = iota // of somebody else
	stale                // ours, of an earlier version or load
	current              // this version's, on the pinned maps
)

// classify tells whose a loaded program is: ours works on our endpoint map.
// "Current" is by code, so that an instance loaded a second time is current too.
func (d *Datapath) classify(id ebpf.ProgramID, name string) (state, error) {
	d.mu.Lock()
	known, ok := d.ours[id]
	d.mu.Unlock()
	if ok && known == name {
		return current, nil
	}
	p, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, os.ErrNotExist) {
		return foreign, nil // it went meanwhile
	}
	if err != nil {
		return foreign, fmt.Errorf("program %d: %w", id, err)
	}
	defer p.Close()
	have, err := describe(p)
	if err != nil {
		return foreign, err
	}
	want, err := describe(d.names[name])
	if err != nil {
		return foreign, err
	}
	endpoints, err := d.objects.Endpoints.Info()
	if err != nil {
		return foreign, fmt.Errorf("map endpoints: %w", err)
	}
	if mapID, _ := endpoints.ID(); !slices.Contains(have.maps, mapID) {
		return foreign, nil
	}
	if have.tag != want.tag {
		return stale, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// IDs are given out in a circle of 2^31 (kernel/bpf/syscall.c: idr_alloc_cyclic).
	d.ours[id] = name
	return current, nil
}

// description is what tells programs apart.
type description struct {
	name string // the first 15 bytes
	tag  string // a hash of the code, maps and constants aside
	maps []ebpf.MapID
}

func describe(p *ebpf.Program) (description, error) {
	info, err := p.Info()
	if err != nil {
		return description{}, fmt.Errorf("program %s: %w", p, err)
	}
	maps, _ := info.MapIDs()
	return description{info.Name, info.Tag, maps}, nil
}

// title names a program for an operator.
func title(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return fmt.Sprintf("program %d", id)
	}
	defer p.Close()
	d, err := describe(p)
	if err != nil || d.name == "" {
		return fmt.Sprintf("program %d", id)
	}
	return fmt.Sprintf("program %d (%s)", id, d.name)
}
