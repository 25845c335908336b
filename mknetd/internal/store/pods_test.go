package store

import (
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
)

// An imported store frees addresses behind those that were free before.
func TestImportKeepsTheOrderOfFreedAddresses(t *testing.T) {
	free := func(s *Store, addresses ...string) {
		t.Helper()
		err := s.update(func(tx *bolt.Tx) (change, error) {
			for _, a := range addresses {
				if err := queueAddress(tx, netip.MustParseAddr(a), Freed{BootID: "b", At: 1}); err != nil {
					return change{}, err
				}
			}
			return change{}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	free(s, "10.9.0.9", "10.9.0.1", "10.9.0.5")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	d := must(ReadDocument(strings.NewReader(asJSON(t, export(t, dir).Content))))(t)
	fresh := filepath.Join(t.TempDir(), "fresh")
	must(Import(fresh, d, "v2", false))(t)
	s = open(t, fresh)
	free(s, "10.9.0.7", "10.9.0.3")
	var got []string
	for _, f := range must(s.FreedAddresses())(t) {
		got = append(got, f.Address.String())
	}
	if want := []string{"10.9.0.9", "10.9.0.1", "10.9.0.5", "10.9.0.7", "10.9.0.3"}; !slices.Equal(got, want) {
		t.Errorf("oldest first: %v, want %v", got, want)
	}
}
