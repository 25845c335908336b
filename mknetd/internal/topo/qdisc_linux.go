package topo

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Of the token bucket filter (tc-tbf(8)).
const (
	tbfLatencySeconds = 0.025 // the longest that a packet waits, as CNI's bandwidth plugin has it
	tbfMinBurst       = 10    // packets of the MTU, where no burst is given
)

// burstBits is the burst that is asked for, else what 10 ms of the rate hold,
// but never less than a few packets: a bucket smaller than a packet passes none.
func (s Step) burstBits() uint64 {
	burst := s.BurstBits
	if burst == 0 {
		burst = s.RateBits / 100
	}
	return max(burst, tbfMinBurst*8*uint64(max(s.MTUBytes, 1)))
}

func (o *object) tbf(l netlink.Link) *netlink.Tbf {
	rate := max(o.RateBits/8, 1)                            // bytes per second
	burst := uint32(min(o.burstBits()/8, math.MaxUint32/2)) // bytes
	limit := min(float64(rate)*tbfLatencySeconds+float64(burst), math.MaxUint32)
	return &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: l.Attrs().Index,
			Handle:    netlink.MakeHandle(QdiscMajor, 0),
			Parent:    netlink.HANDLE_ROOT,
		},
		Rate:   rate,
		Limit:  uint32(limit),
		Buffer: netlink.Xmittime(rate, burst),
	}
}

// rootQdisc returns the root of a device, nil for the default one that the
// kernel chose (its handle is 0).
func rootQdisc(ctx context.Context, s site, l netlink.Link) (netlink.Qdisc, error) {
	list, err := dump(ctx, func() ([]netlink.Qdisc, error) { return s.route.QdiscList(l) })
	if err != nil {
		return nil, fmt.Errorf("list queueing disciplines: %w", err)
	}
	for _, q := range list {
		if a := q.Attrs(); a.Parent == netlink.HANDLE_ROOT && a.Handle != 0 {
			return q, nil
		}
	}
	return nil, nil
}

func ensureQdisc(ctx context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil {
		return err
	}
	want := o.tbf(l)
	have, err := rootQdisc(ctx, s, l)
	if err != nil {
		return err
	}
	if have != nil && have.Attrs().Handle != want.Handle {
		return fmt.Errorf("%s has a %s of its own: %w", o.Link, have.Type(), ErrForeign)
	}
	o.changed = true
	if err := s.route.QdiscReplace(want); err != nil {
		return fmt.Errorf("set (modprobe sch_tbf): %w", err)
	}
	return nil
}

func checkQdisc(ctx context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil {
		return nil, err
	}
	have, err := rootQdisc(ctx, s, l)
	if err != nil {
		return nil, err
	}
	if have == nil {
		return []string{"missing"}, nil
	}
	want := o.tbf(l)
	tbf, ok := have.(*netlink.Tbf)
	if !ok || have.Attrs().Handle != want.Handle {
		return []string{fmt.Sprintf("is a %s, want a tbf", have.Type())}, nil
	}
	if tbf.Rate != want.Rate || tbf.Buffer != want.Buffer || tbf.Limit != want.Limit {
		return []string{fmt.Sprintf("rate is %d bit/s, want %d bit/s with burst %d bit", tbf.Rate*8, want.Rate*8, o.burstBits())}, nil
	}
	return nil, nil
}

func removeQdisc(ctx context.Context, o *object, s site) error {
	l, err := o.device(s)
	if err != nil || l == nil {
		return err
	}
	want := o.tbf(l)
	have, err := rootQdisc(ctx, s, l)
	if err != nil || have == nil || have.Attrs().Handle != want.Handle {
		return err
	}
	err = s.route.QdiscDel(want)
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}
