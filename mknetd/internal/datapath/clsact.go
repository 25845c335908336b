package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
)

// Our filter's place on a clsact hook: before every filter whose priority tc chose
// by itself (49152 and below), with a handle that no one else counts to.
const (
	FilterPriority uint16 = 1
	FilterHandle   uint32 = 0x6d6b
)

func (h hook) parent() uint32 {
	if h == ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

// filters lists the hook's filters in the order in which they run. A link without
// clsact has none.
func (a *attachment) filters(l netlink.Link) ([]netlink.Filter, error) {
	has, err := a.d.hasClsact(l)
	if err != nil || !has {
		return nil, err
	}
	list, err := netns.Dump(func() ([]netlink.Filter, error) { return a.d.links.FilterList(l, a.hook.parent()) })
	if err != nil {
		return nil, fmt.Errorf("list the filters of %s: %w", a.Name(), err)
	}
	return list, nil
}

func (d *Datapath) hasClsact(l netlink.Link) (bool, error) {
	qdiscs, err := netns.Dump(func() ([]netlink.Qdisc, error) { return d.links.QdiscList(l) })
	if err != nil {
		return false, fmt.Errorf("list the qdiscs of %s: %w", l.Attrs().Name, err)
	}
	for _, q := range qdiscs {
		if q.Type() == "clsact" {
			return true, nil
		}
	}
	return false, nil
}

// own returns our filter, nil where there is none, and what runs before it. A
// filter of another kind or program at our place is foreign and in our way.
func own(list []netlink.Filter) (mine *netlink.BpfFilter, before netlink.Filter) {
	for _, f := range list {
		at := f.Attrs()
		if at.Priority == FilterPriority && at.Handle == FilterHandle {
			b, _ := f.(*netlink.BpfFilter)
			return b, before
		}
		// A u32 filter's hash tables are listed as filters; they match nothing, but
		// one with priority 1 keeps us from that place all the same.
		if before == nil && at.Priority <= FilterPriority {
			before = f
		}
	}
	return nil, before
}

func filterTitle(f netlink.Filter) string {
	return fmt.Sprintf("%s filter with priority %d, handle %#x", f.Type(), f.Attrs().Priority, f.Attrs().Handle)
}

func (a *attachment) checkFilter(l netlink.Link) (string, error) {
	list, err := a.filters(l)
	if err != nil {
		return "", err
	}
	mine, before := own(list)
	if mine == nil {
		return "not attached", nil
	}
	switch st, err := a.d.classify(ebpf.ProgramID(mine.Id), a.program); {
	case err != nil:
		return "", err
	case st == foreign:
		return "replaced by " + title(ebpf.ProgramID(mine.Id)), nil
	case st == stale:
		return "of another version", nil
	case !mine.DirectAction:
		return "the filter is not direct-action", nil
	case before != nil:
		return "shadowed by a " + filterTitle(before), nil
	}
	return "", nil
}

// ensureFilter leaves our filter in its place with this version's program; it is
// replaced in place (net/sched/cls_bpf.c: list_replace_rcu).
func (a *attachment) ensureFilter(l netlink.Link) error {
	q := &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	}
	has, err := a.d.hasClsact(l)
	if err != nil {
		return err
	}
	if !has {
		if err := a.d.links.QdiscAdd(q); err != nil {
			return fmt.Errorf("add a clsact qdisc: %w", err)
		}
	}
	list, err := a.filters(l)
	if err != nil {
		return err
	}
	mine, before := own(list)
	if mine != nil {
		st, err := a.d.classify(ebpf.ProgramID(mine.Id), a.program)
		if err != nil {
			return err
		}
		if st == current && mine.DirectAction {
			return shadowed(before)
		}
	}
	if err := a.replaceFilter(l); err != nil {
		return errors.Join(err, shadowed(before))
	}
	// Among cls_bpf filters of one priority the newest runs first, so that what
	// stood before the place may stand behind us now.
	if list, err = a.filters(l); err != nil {
		return err
	}
	_, before = own(list)
	return shadowed(before)
}

func shadowed(before netlink.Filter) error {
	if before == nil {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrShadowed, filterTitle(before))
}

func (a *attachment) filter(l netlink.Link) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: a.hook.parent(), Handle: FilterHandle,
			Priority: FilterPriority, Protocol: unix.ETH_P_ALL,
		},
		Name: "mknet-" + a.program, DirectAction: true,
	}
}

func (a *attachment) replaceFilter(l netlink.Link) error {
	f := a.filter(l)
	f.Fd = a.d.names[a.program].FD()
	if err := a.d.links.FilterReplace(f); err != nil {
		return fmt.Errorf("set the filter with priority %d, handle %#x: %w", FilterPriority, FilterHandle, err)
	}
	return nil
}

// removeFilter removes our filter and leaves the qdisc, which others may use. A
// foreign program in our place stays.
func (a *attachment) removeFilter(l netlink.Link) error {
	list, err := a.filters(l)
	if err != nil {
		return err
	}
	mine, _ := own(list)
	if mine == nil {
		return nil
	}
	if st, err := a.d.classify(ebpf.ProgramID(mine.Id), a.program); err != nil || st == foreign {
		return err
	}
	err = a.d.links.FilterDel(a.filter(l))
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove the filter: %w", err)
	}
	return nil
}
