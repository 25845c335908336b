package engine

import (
	"encoding/json"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"mknet/mknetd/internal/store"
	"mknet/spec/endpoint"
)

// The document of a lease that was claimed may have stayed (the disk was full). It
// keeps no mknetd from its start when the address is leased again.
func TestTwoLeasesOfOneAddress(t *testing.T) {
	pool := endpoint.Pool{Name: "blue", Prefix: netip.MustParsePrefix("10.92.0.0/29"), Gateway: netip.MustParseAddr("10.92.0.1")}
	st, err := store.Open(store.Options{Dir: filepath.Join(t.TempDir(), "state"), Pools: endpoint.DefaultPools})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	const boot = "00000000-0000-4000-8000-000000000000"
	e := &Engine{store: st, bootID: boot}
	docs, err := e.leaseDocuments()
	if err != nil {
		t.Fatal(err)
	}
	one, two := netip.MustParseAddr("10.92.0.2"), netip.MustParseAddr("10.92.0.3")
	for _, l := range []lease{
		{ID: "a", Address: one, BootID: boot, Expires: 2 * time.Minute},
		{ID: "b", Address: one, BootID: boot, Expires: 3 * time.Minute},
		{ID: "c", Address: one, BootID: boot, Expires: time.Minute},
		{ID: "d", Address: two, BootID: boot, Expires: time.Minute},
		{ID: "e", Address: netip.MustParseAddr("10.92.0.4"), BootID: "another", Expires: time.Minute},
	} {
		doc, err := json.Marshal(l)
		if err := errors.Join(err, docs.Put(l.ID, doc)); err != nil {
			t.Fatal(err)
		}
	}
	if e.addresses, err = loadAddresses(st, Config{PodPools: []endpoint.Pool{pool}}); err != nil {
		t.Fatal(err)
	}
	if err := e.loadLeases(); err != nil {
		t.Fatal(err)
	}
	open := e.addresses.leases.open
	if len(open) != 2 || open["b"] == nil || open["d"] == nil {
		t.Errorf("open are %v, want b and d", open)
	}
	if live := e.addresses.slots[0].Counts(e.now()); live.Live != 2 {
		t.Errorf("%d addresses are taken, want 2", live.Live)
	}
	var left []string
	if err := docs.Each(func(name string, _ []byte) error { left = append(left, name); return nil }); err != nil {
		t.Fatal(err)
	}
	if slices.Sort(left); !slices.Equal(left, []string{"b", "d"}) {
		t.Errorf("documents are left of %v, want b and d", left)
	}
}
