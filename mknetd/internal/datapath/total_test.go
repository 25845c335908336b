package datapath

import (
	"testing"
)

// The counts of all endpoints together have those of endpoints that are gone, and of
// ones that came again.
func TestTotalNeverGoesDown(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		total := func() Counters {
			t.Helper()
			c, err := d.Total()
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		before := total()
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		a.mustPing(t, b.Address)
		was := total()
		if n := was[by].Packets - before[by].Packets; n != 6 {
			t.Errorf("%d packets by %s, want 6: 3 requests and their answers", n, by)
		}
		for _, o := range d.Objects(a.Endpoint) {
			if err := o.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := d.Counters(a.Address); err == nil {
			t.Error("an endpoint that is gone has counters")
		}
		now := total()
		for i := range now { // IPv6 has its own mind about when to send
			if now[i].Packets < was[i].Packets || now[i].Bytes < was[i].Bytes || Outcome(i) == by && now[i] != was[i] {
				t.Errorf("%s after a removal: %v, was %v", Outcome(i), now[i], was[i])
			}
		}
		a.heal(t)
		a.mustPing(t, b.Address)
		if n := total()[by].Packets - was[by].Packets; n != 6 {
			t.Errorf("%d packets by %s since the endpoint came again, want 6", n, by)
		}
	})
}
