package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// pin is where the attachment's BPF link is pinned.
func (a *attachment) pin() string { return filepath.Join(a.d.cfg.Dir, linksDir, a.Name()) }

func (h hook) tcx() ebpf.AttachType {
	if h == ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// tcxState is what stands on the hook and what the pin holds.
type tcxState struct {
	link    link.Link // the pinned link, nil where there is none; closed by close
	id      link.ID
	ifIndex uint32 // that it is attached to, 0 when it is detached
	program ebpf.ProgramID
	hook    *link.QueryResult
}

func (s *tcxState) close() {
	if s.link != nil {
		s.link.Close()
	}
}

// on reports whether the pinned link is attached to the device.
func (s *tcxState) on(l netlink.Link) bool {
	return s.link != nil && s.ifIndex == uint32(l.Attrs().Index)
}

// first reports whether the pinned link's program is the first to run.
func (s *tcxState) first() bool {
	if len(s.hook.Programs) == 0 {
		return false
	}
	id, ok := s.hook.Programs[0].LinkID()
	return ok && id == s.id
}

// readTCX reads the hook of l, or the pin alone where l is nil.
func (a *attachment) readTCX(l netlink.Link) (*tcxState, error) {
	s := &tcxState{hook: &link.QueryResult{}}
	pinned, err := link.LoadPinnedLink(a.pin(), nil)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("take pin %s: %w", a.pin(), err)
	default:
		s.link = pinned
		info, err := pinned.Info()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("pin %s: %w", a.pin(), err), pinned.Close())
		}
		s.id, s.program = info.ID, info.Program
		if t := info.TCX(); t != nil {
			s.ifIndex = t.Ifindex
		}
	}
	if l == nil {
		return s, nil
	}
	s.hook, err = link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: a.hook.tcx()})
	if err != nil {
		s.close()
		return nil, fmt.Errorf("ask for the programs on %s: %w", a.Name(), err)
	}
	return s, nil
}

func (a *attachment) checkTCX(l netlink.Link) (string, error) {
	s, err := a.readTCX(l)
	if err != nil {
		return "", err
	}
	defer s.close()
	if !s.on(l) {
		return "not attached", nil
	}
	switch st, err := a.d.classify(s.program, a.program); {
	case err != nil:
		return "", err
	case st == foreign:
		return "replaced by " + title(s.program), nil
	case st == stale:
		return "of another version", nil
	case !s.first():
		return "shadowed by " + title(s.hook.Programs[0].ID), nil
	}
	return "", nil
}

// ensureTCX leaves our program attached, of this version, and first to run. There
// is no moment without it: a program is replaced in place, and a link that must
// move goes only when the new one is there.
func (a *attachment) ensureTCX(l netlink.Link) error {
	s, err := a.readTCX(l)
	if err != nil {
		return err
	}
	defer s.close()
	if s.on(l) {
		st, err := a.d.classify(s.program, a.program)
		if err != nil {
			return err
		}
		if st != current {
			if err := a.update(s.link); err != nil {
				return err
			}
		}
		if s.first() {
			return nil
		}
	}
	return a.attachTCX(l)
}

// update puts this version's program into a link that is attached.
func (a *attachment) update(l link.Link) error {
	p := a.d.names[a.program]
	err := l.Update(p)
	if errors.Is(err, unix.EEXIST) { // by another link on the same hook
		var done func()
		if p, done, err = a.d.instance(a.program); err != nil {
			return err
		}
		defer done()
		err = l.Update(p)
	}
	if err != nil {
		return fmt.Errorf("replace the program in place: %w", err)
	}
	return nil
}

// attachTCX attaches our program before all others and pins the link.
func (a *attachment) attachTCX(l netlink.Link) error {
	o := link.TCXOptions{
		Interface: l.Attrs().Index,
		Attach:    a.hook.tcx(),
		Anchor:    link.Head(),
		Program:   a.d.names[a.program],
	}
	made, err := link.AttachTCX(o)
	if errors.Is(err, unix.EEXIST) {
		// A program can be on a hook once (kernel/bpf/mprog.c): the link that we
		// are about to replace has it. A second instance is another program.
		var done func()
		if o.Program, done, err = a.d.instance(a.program); err != nil {
			return err
		}
		defer done()
		made, err = link.AttachTCX(o)
	}
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	// The pin keeps it; what was pinned before is detached with its last reference.
	defer made.Close()
	a.d.pinsMu.Lock()
	defer a.d.pinsMu.Unlock()
	return repin(made, a.pin())
}

// removePin removes the pin unless its program is attached to another endpoint's
// link. One that is attached to nothing is left of a link that is gone: a successor
// pins its own in place of it.
func (a *attachment) removePin() error {
	a.d.pinsMu.Lock()
	defer a.d.pinsMu.Unlock()
	s, err := a.readTCX(nil)
	if err != nil || s.link == nil {
		return err
	}
	defer s.close()
	if s.ifIndex != 0 {
		l, err := a.d.links.LinkByIndex(int(s.ifIndex))
		var gone netlink.LinkNotFoundError
		switch {
		case errors.As(err, &gone): // just now
		case err != nil:
			return fmt.Errorf("find link %d: %w", s.ifIndex, err)
		case !owns(a.gen, l):
			return nil
		}
	}
	return unpin(a.pin())
}

// instance loads the program once more. done lets go of it.
func (d *Datapath) instance(name string) (p *ebpf.Program, done func(), err error) {
	var all programPrograms
	if err := d.load(&all); err != nil {
		return nil, nil, err
	}
	return byName(&all)[name], func() { _ = all.Close() }, nil
}
