package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// orphan is something of ours that no record stands for.
type orphan struct {
	fault  endpoint.Fault
	remove func() error
}

// Orphans lists what is ours and belongs to a link that no record knows: pinned
// links, filters, and entries of the endpoint map.
func (d *Datapath) Orphans(known func(link string) bool) ([]endpoint.Fault, error) {
	list, err := d.orphans(known)
	var faults []endpoint.Fault
	for _, o := range list {
		faults = append(faults, o.fault)
	}
	return faults, err
}

// RemoveOrphans removes what Orphans lists, and goes on past errors.
func (d *Datapath) RemoveOrphans(known func(link string) bool) error {
	list, err := d.orphans(known)
	errs := []error{err}
	for _, o := range list {
		if err := o.remove(); err != nil {
			errs = append(errs, fmt.Errorf("remove orphan %s: %w", o.fault.Object, err))
		}
	}
	return errors.Join(errs...)
}

func (d *Datapath) orphans(known func(string) bool) ([]orphan, error) {
	attached, err := d.attachments()
	if err != nil {
		return nil, err
	}
	var list []orphan
	for _, a := range attached {
		if !known(a.link) {
			list = append(list, orphan{
				fault:  endpoint.Fault{Kind: a.Kind(), Object: a.Name(), Where: a.Where(), Problem: "no endpoint has this link", Inspect: a.inspect()},
				remove: a.drop,
			})
		}
	}
	entries, err := d.entryOrphans(known)
	return append(list, entries...), err
}

// drop is Remove for an attachment that was found.
func (a *attachment) drop() error {
	if a.d.cfg.Attach == TCX {
		return unpin(a.pin())
	}
	l, err := a.d.linkByName(a.link)
	if err != nil || l == nil {
		return err
	}
	return a.removeFilter(l)
}

// entryOrphans lists the entries of the maps whose link no record knows.
func (d *Datapath) entryOrphans(known func(string) bool) ([]orphan, error) {
	links := map[uint32]attachmentValue{}
	var index uint32
	var at attachmentValue
	it := d.objects.Attachments.Iterate()
	for it.Next(&index, &at) {
		links[index] = at
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("map attachments: %w", err)
	}
	var list []orphan
	var key address
	var v endpointValue
	it = d.objects.Endpoints.Iterate()
	for it.Next(&key, &v) {
		at, ok := links[v.IfIndex]
		if ok && at.Address == key {
			delete(links, v.IfIndex)
			if known(at.link()) {
				continue
			}
		}
		list = append(list, d.entryOrphan(key, v, at.link()))
	}
	if err := it.Err(); err != nil {
		return list, fmt.Errorf("map endpoints: %w", err)
	}
	for index, at := range links { // without an endpoint: its maker or remover died
		if !known(at.link()) {
			list = append(list, d.entryOrphan(at.Address, endpointValue{IfIndex: index}, at.link()))
		}
	}
	return list, nil
}

func (d *Datapath) entryOrphan(key address, v endpointValue, name string) orphan {
	if name == "" {
		name = fmt.Sprintf("with index %d", v.IfIndex)
	}
	return orphan{
		fault: endpoint.Fault{
			Kind: KindEntry, Object: key.String(), Where: endpoint.InHost, Problem: "no endpoint has its link " + name,
			Inspect: d.Inspect("endpoints"),
		},
		remove: func() error { return d.forget(key, v) },
	}
}

func (a address) String() string { return fmt.Sprintf("%d.%d.%d.%d", a[0], a[1], a[2], a[3]) }

// attachments lists every attachment of ours that is found on this node, by pin
// or filter.
func (d *Datapath) attachments() ([]*attachment, error) {
	if d.cfg.Attach == TCX {
		return d.pinned()
	}
	all, err := netns.Dump(d.links.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var list []*attachment
	for _, l := range all {
		for _, h := range hooks {
			a := &attachment{d: d, link: l.Attrs().Name, hook: h}
			found, err := a.identify(l)
			if err != nil {
				return list, err
			}
			if found {
				list = append(list, a)
			}
		}
	}
	return list, nil
}

// identify fills in which program of ours the filter holds.
func (a *attachment) identify(l netlink.Link) (bool, error) {
	filters, err := a.filters(l)
	if err != nil {
		return false, err
	}
	mine, _ := own(filters)
	if mine == nil {
		return false, nil
	}
	name, ours := strings.CutPrefix(mine.Name, "mknet-")
	if _, known := a.d.names[name]; !ours || !known {
		return false, nil
	}
	a.program = name
	return true, nil
}

// pinned lists the attachments by their pins.
func (d *Datapath) pinned() ([]*attachment, error) {
	pins, err := os.ReadDir(filepath.Join(d.cfg.Dir, linksDir))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list pins: %w", err)
	}
	var list []*attachment
	for _, p := range pins {
		for _, h := range hooks {
			if name, ok := strings.CutSuffix(p.Name(), "-"+string(h)); ok {
				list = append(list, &attachment{d: d, link: name, hook: h})
			}
		}
	}
	return list, nil
}

// upgrade replaces in place every program of ours that is attached.
func (d *Datapath) upgrade() error {
	list, err := d.attachments()
	if err != nil {
		return err
	}
	for _, a := range list {
		if err := a.upgrade(); err != nil {
			return fmt.Errorf("upgrade %s: %w", a.Name(), err)
		}
	}
	return nil
}

func (a *attachment) upgrade() error {
	if a.d.cfg.Attach == Clsact {
		l, err := a.d.linkByName(a.link)
		if err != nil || l == nil {
			return err
		}
		return a.replaceFilter(l)
	}
	s, err := a.readTCX(nil)
	if err != nil || s.link == nil {
		return err
	}
	defer s.close()
	if s.ifIndex == 0 {
		return nil // detached: Check reports it, Ensure or RemoveOrphans settles it
	}
	p, err := ebpf.NewProgramFromID(s.program)
	if err != nil {
		return fmt.Errorf("program %d: %w", s.program, err)
	}
	have, err := describe(p)
	p.Close()
	if err != nil {
		return err
	}
	if _, ok := a.d.names[have.name]; !ok {
		return nil // a foreign program took the link over: the same
	}
	a.program = have.name
	return a.update(s.link)
}

// Purge is Datapath.Purge of one that is not open. It reports whether there was
// anything of a data path in the folder of pins. Where links are pinned it loads no
// program for that; which filters are ours only loaded ones tell.
func Purge(cfg Config) (found bool, err error) {
	if cfg.Dir == "" {
		cfg.Dir = DefaultDir
	}
	entries, err := os.ReadDir(cfg.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("purge the data path: %w", err)
	}
	d := &Datapath{cfg: cfg}
	if err := d.choose(); err != nil {
		return false, fmt.Errorf("purge the data path: %w", err)
	}
	if d.cfg.Attach == Clsact {
		if d, err = Open(cfg); err != nil {
			return false, fmt.Errorf("purge: %w", err)
		}
	}
	return len(entries) > 0, errors.Join(d.Purge(), d.Close())
}

// Purge removes everything of ours: attachments, then maps and programs. Packets
// are no longer judged from then on. The Datapath may only be closed after it.
func (d *Datapath) Purge() error {
	list, err := d.attachments()
	errs := []error{err}
	for _, a := range list {
		errs = append(errs, a.drop())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("purge the data path: %w", err)
	}
	for _, sub := range []string{linksDir, programsDir, mapsDir} {
		if err := os.RemoveAll(filepath.Join(d.cfg.Dir, sub)); err != nil {
			return fmt.Errorf("purge the data path: %w", err)
		}
	}
	// The root of a mount stays, and so does what others keep there.
	err = os.Remove(d.cfg.Dir)
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("purge the data path: %w", err)
	}
	return nil
}
