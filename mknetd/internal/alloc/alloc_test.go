package alloc

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

func at(d time.Duration) Instant { return Instant{BootID: "b", At: d} }

func mustNew(t testing.TB, total uint32, quarantine time.Duration, live []uint32, freed []Freed) *Allocator {
	t.Helper()
	a, err := New(total, quarantine, live, freed)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// take allocates n slots at a moment.
func take(t testing.TB, a *Allocator, n int, now Instant) (slots []uint32, early []bool) {
	t.Helper()
	for range n {
		g, err := a.Allocate(now)
		if err != nil {
			t.Fatal(err)
		}
		slots, early = append(slots, g.Slot), append(early, g.Early)
	}
	return slots, early
}

func TestOrder(t *testing.T) {
	a := mustNew(t, 6, 30*time.Second, []uint32{1}, []Freed{{Slot: 4, BootID: "older", At: time.Hour}})
	got, _ := take(t, a, 4, at(0))
	if !slices.Equal(got, []uint32{0, 2, 3, 5}) {
		t.Fatalf("never-used slots: %v", got)
	}
	for i, s := range []uint32{3, 0, 5} {
		if err := a.Free(s, at(time.Duration(i)*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	// Slot 4 was freed in another boot: its quarantine is over whatever the clocks
	// say. The others go in the order they were freed.
	got, early := take(t, a, 4, at(31*time.Second))
	if !slices.Equal(got, []uint32{4, 3, 0, 5}) || !slices.Equal(early, []bool{false, false, false, true}) {
		t.Errorf("freed slots: %v, early %v", got, early)
	}
	var full *ExhaustedError
	if _, err := a.Allocate(at(time.Hour)); !errors.As(err, &full) || full.Counts != (Counts{Total: 6, Live: 6}) {
		t.Errorf("full pool: %v", err)
	}
}

func TestQuarantine(t *testing.T) {
	for _, c := range []struct {
		name       string
		quarantine time.Duration
		now        Instant
		early      bool
	}{
		{"just freed", 30 * time.Second, at(10 * time.Second), true},
		{"a moment before its end", 30 * time.Second, at(40*time.Second - 1), true},
		{"at its end", 30 * time.Second, at(40 * time.Second), false},
		{"after a reboot", 30 * time.Second, Instant{BootID: "later", At: time.Second}, false},
		{"turned off", 0, at(10 * time.Second), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			freed := []Freed{{Slot: 0, BootID: "b", At: 10 * time.Second}}
			a := mustNew(t, 1, c.quarantine, nil, freed)
			want := uint32(0)
			if c.early {
				want = 1
			}
			if n := a.Counts(c.now).Quarantined; n != want {
				t.Errorf("%d quarantined, want %d", n, want)
			}
			// Nothing else is left, so it is handed out all the same, and says so.
			if g, err := a.Allocate(c.now); err != nil || g.Early != c.early {
				t.Errorf("got %+v, %v, want early %v", g, err, c.early)
			}
			a = mustNew(t, 2, c.quarantine, nil, freed)
			if g, err := a.Claim(0, c.now); err != nil || g.Early != c.early {
				t.Errorf("by name: got %+v, %v, want early %v", g, err, c.early)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	a := mustNew(t, 4, time.Minute, nil, []Freed{{Slot: 0, BootID: "b", At: 1}, {Slot: 1, BootID: "b", At: 2}})
	now := at(time.Hour)
	take(t, a, 2, now) // 2 and 3, never used
	if err := errors.Join(a.Cancel(3, now), a.Cancel(2, now)); err != nil {
		t.Fatal(err)
	}
	if got, _ := take(t, a, 4, now); !slices.Equal(got, []uint32{2, 3, 0, 1}) {
		t.Fatalf("after cancelling never-used slots: %v", got)
	}
	// Cancelled in the other order than taken, they still stand as they stood.
	if err := errors.Join(a.Cancel(1, now), a.Cancel(0, now)); err != nil {
		t.Fatal(err)
	}
	if got, _ := take(t, a, 2, now); !slices.Equal(got, []uint32{0, 1}) {
		t.Fatalf("after cancelling freed slots: %v", got)
	}
	// A claim of the second in the queue rests anew when it is cancelled.
	if err := errors.Join(a.Free(0, now), a.Free(1, now)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Claim(1, now); err != nil {
		t.Fatal(err)
	}
	if err := a.Cancel(1, now); err != nil {
		t.Fatal(err)
	}
	if got, early := take(t, a, 2, now); !slices.Equal(got, []uint32{0, 1}) || !early[1] {
		t.Fatalf("after cancelling a claim: %v %v", got, early)
	}
	for range 1000 { // a claim that keeps failing must not make anything grow
		b := a
		if err := b.Cancel(2, now); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Claim(2, now); err != nil {
			t.Fatal(err)
		}
	}
	if len(a.returned) > 4 {
		t.Errorf("%d slots wait in a heap of a pool of 4", len(a.returned))
	}
}

func TestRefusals(t *testing.T) {
	for name, f := range map[string]func() error{
		"no slots":       func() error { _, err := New(0, 0, nil, nil); return err },
		"too many slots": func() error { _, err := New(MaxSlots+1, 0, nil, nil); return err },
		"negative rest":  func() error { _, err := New(1, -1, nil, nil); return err },
	} {
		if f() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	var slot *SlotError
	a := mustNew(t, 4, 0, []uint32{0}, []Freed{{Slot: 1}})
	for name, f := range map[string]func() error{
		"live twice":             func() error { _, err := New(4, 0, []uint32{1, 1}, nil); return err },
		"live and freed":         func() error { _, err := New(4, 0, []uint32{1}, []Freed{{Slot: 1}}); return err },
		"live outside":           func() error { _, err := New(4, 0, []uint32{4}, nil); return err },
		"freed outside":          func() error { _, err := New(4, 0, nil, []Freed{{Slot: 9}}); return err },
		"claim of a live one":    func() error { _, err := a.Claim(0, at(0)); return err },
		"claim outside":          func() error { _, err := a.Claim(4, at(0)); return err },
		"freed again":            func() error { return a.Free(1, at(0)) },
		"freed but never used":   func() error { return a.Free(2, at(0)) },
		"freed outside the pool": func() error { return a.Free(4, at(0)) },
		"cancel of a freed one":  func() error { return a.Cancel(1, at(0)) },
		"cancel outside":         func() error { return a.Cancel(4, at(0)) },
	} {
		if err := f(); !errors.As(err, &slot) {
			t.Errorf("%s: got %v, want a *SlotError", name, err)
		}
	}
	if c := a.Counts(at(0)); c != (Counts{Total: 4, Live: 1, Freed: 1, NeverUsed: 2}) || c.Free() != 3 {
		t.Errorf("counts after refusals: %+v", c)
	}
}

// model is the rule as slowly and plainly as it can be said.
type model struct {
	total      uint32
	quarantine time.Duration
	live       map[uint32]origin
	queue      []Freed
	used       map[uint32]bool
}

// origin is where a live slot came from, for Cancel.
type origin struct {
	fresh bool
	turn  *Freed // its entry, when it was at the head
}

func (m *model) rests(f Freed, now Instant) bool {
	return f.BootID == now.BootID && now.At-f.At < m.quarantine
}

func (m *model) allocate(now Instant) (Grant, bool) {
	for s := range m.total {
		if !m.used[s] {
			m.used[s] = true
			m.live[s] = origin{fresh: true}
			return Grant{Slot: s}, true
		}
	}
	if len(m.queue) == 0 {
		return Grant{}, false
	}
	return m.takeAt(0, now), true
}

func (m *model) takeAt(i int, now Instant) Grant {
	f := m.queue[i]
	m.queue = slices.Delete(m.queue, i, i+1)
	o := origin{}
	if i == 0 {
		o.turn = &f
	}
	m.live[f.Slot] = o
	return Grant{Slot: f.Slot, Early: m.rests(f, now)}
}

func (m *model) claim(s uint32, now Instant) (Grant, bool) {
	if _, ok := m.live[s]; ok || s >= m.total {
		return Grant{}, false
	}
	if !m.used[s] {
		m.used[s] = true
		m.live[s] = origin{fresh: true}
		return Grant{Slot: s}, true
	}
	return m.takeAt(slices.IndexFunc(m.queue, func(f Freed) bool { return f.Slot == s }), now), true
}

func (m *model) free(s uint32, now Instant) bool {
	if _, ok := m.live[s]; !ok {
		return false
	}
	delete(m.live, s)
	m.queue = append(m.queue, Freed{Slot: s, BootID: now.BootID, At: now.At})
	return true
}

// cancel is only asked for the slot that was taken last, where its place is plain.
func (m *model) cancel(s uint32, now Instant) bool {
	o, ok := m.live[s]
	if !ok {
		return false
	}
	delete(m.live, s)
	switch {
	case o.fresh:
		delete(m.used, s)
	case o.turn != nil:
		m.queue = slices.Insert(m.queue, 0, *o.turn)
	default:
		m.queue = append(m.queue, Freed{Slot: s, BootID: now.BootID, At: now.At})
	}
	return true
}

func (m *model) counts(now Instant) Counts {
	c := Counts{Total: m.total, Live: uint32(len(m.live)), Freed: uint32(len(m.queue))}
	c.NeverUsed = m.total - c.Live - c.Freed
	for _, f := range m.queue {
		if m.rests(f, now) {
			c.Quarantined++
		}
	}
	return c
}

// FuzzModel runs the allocator beside the model through any history, reboots and
// restarts from what the store would know included.
func FuzzModel(f *testing.F) {
	f.Add(byte(4), byte(3), []byte{0, 0, 0, 0, 0, 10, 20, 11, 21, 0, 0, 50, 0, 0, 60})
	f.Add(byte(1), byte(0), []byte{0, 10, 0, 30, 10, 70, 0})
	f.Add(byte(16), byte(9), []byte{41, 42, 30, 0, 31, 40, 12, 22, 61, 71, 0, 30, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, total, quarantine byte, history []byte) {
		n := uint32(total%24) + 1
		rest := time.Duration(quarantine%16) * time.Second
		m := &model{total: n, quarantine: rest, live: map[uint32]origin{}, used: map[uint32]bool{}}
		a := mustNew(t, n, rest, nil, nil)
		now := at(0)
		last := uint32(0) // the slot that was taken last
		for i, b := range history {
			slot := uint32(b%10) * n / 9
			var got, want Grant
			var err error
			ok := true
			switch what := b / 10; what {
			case 0, 1, 2:
				got, err = a.Allocate(now)
				want, ok = m.allocate(now)
				last = want.Slot
			case 3, 4, 5, 6, 7, 8:
				err, ok = a.Free(slot, now), m.free(slot, now)
			case 9, 10, 11, 12:
				got, err = a.Claim(slot, now)
				want, ok = m.claim(slot, now)
				last = want.Slot
			case 13, 14, 15, 16:
				if i == 0 || history[i-1]/10 > 2 && (history[i-1]/10 < 9 || history[i-1]/10 > 12) {
					continue
				}
				err, ok = a.Cancel(last, now), m.cancel(last, now)
			case 17, 18, 19, 20, 21:
				now.At += time.Duration(b%10) * time.Second
			case 22: // a reboot
				now = Instant{BootID: fmt.Sprint("b", i), At: time.Second}
			default: // a restart
				var live []uint32
				for s := range m.live {
					live = append(live, s)
					m.live[s] = origin{} // the store does not know where it came from
				}
				a = mustNew(t, n, rest, live, m.queue)
			}
			if (err == nil) != ok || err == nil && got != want {
				t.Fatalf("step %d (%d): got %+v, %v; want %+v, %v", i, b, got, err, want, ok)
			}
			if got, want := a.Counts(now), m.counts(now); got != want {
				// The allocator counts the rested ones from the end of the queue; after
				// a reboot the order in time is that of the queue too.
				t.Fatalf("step %d (%d): counts %+v, want %+v", i, b, got, want)
			}
		}
	})
}

// BenchmarkFull is the cost in the largest pool, full but for one slot.
func BenchmarkFull(b *testing.B) {
	live := make([]uint32, MaxSlots-1)
	for i := range live {
		live[i] = uint32(i)
	}
	a := mustNew(b, MaxSlots, time.Second, live, nil)
	for b.Loop() {
		g, err := a.Allocate(at(0))
		if err != nil {
			b.Fatal(err)
		}
		if err := a.Free(g.Slot, at(0)); err != nil {
			b.Fatal(err)
		}
	}
}
