package store

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// FreedAddress is an address of a pod pool that was in use and is free again.
type FreedAddress struct {
	Address netip.Addr    `json:"address"`
	Turn    uint64        `json:"turn"`   // ascending in the order of freeing
	BootID  string        `json:"bootID"` // the boot whose clock At is on
	At      time.Duration `json:"at"`     // CLOCK_BOOTTIME, nanoseconds
}

// kindFreed is the kind of document that holds them, by address. It is changed
// only together with the record that had, or gets, the address.
var kindFreed = []byte("freed-addresses")

// HasPooledAddress reports whether the endpoint's address comes from a pool of
// mknetd for ordinary pods, and not from a delegated plugin.
func HasPooledAddress(ep *endpoint.Endpoint) bool {
	return ep.Mode == endpoint.Veth && ep.Pool != ""
}

func claimAddress(tx *bolt.Tx, addr netip.Addr) error {
	b := tx.Bucket(bucketDocuments).Bucket(kindFreed)
	if b == nil {
		return nil
	}
	return b.Delete([]byte(addr.String()))
}

func queueAddress(tx *bolt.Tx, addr netip.Addr, freed Freed) error {
	b, err := tx.Bucket(bucketDocuments).CreateBucketIfNotExists(kindFreed)
	if err != nil {
		return err
	}
	turn, err := b.NextSequence()
	if err != nil {
		return err
	}
	doc, err := json.Marshal(FreedAddress{Address: addr, Turn: turn, BootID: freed.BootID, At: freed.At})
	if err != nil {
		return err
	}
	key := []byte(addr.String())
	return b.Put(key, seal((&Documents{kind: kindFreed}).scope(), key, doc))
}

// continueTurns lets an address that is freed from now on have a later turn than this
// one.
func continueTurns(b *bolt.Bucket, freed []byte) error {
	var f FreedAddress
	if err := json.Unmarshal(freed, &f); err != nil {
		return fmt.Errorf("is not a freed address: %w", err)
	}
	return b.SetSequence(max(b.Sequence(), f.Turn))
}

// FreedAddresses returns the freed addresses of all pod pools, oldest first.
func (s *Store) FreedAddresses() ([]FreedAddress, error) {
	var list []FreedAddress
	docs := &Documents{store: s, kind: kindFreed}
	err := docs.Each(func(name string, content []byte) error {
		var f FreedAddress
		if err := json.Unmarshal(content, &f); err != nil || f.Address.String() != name {
			return s.corrupt(kindFreed, []byte(name), "is not a freed address: %v", err)
		}
		list = append(list, f)
		return nil
	})
	slices.SortFunc(list, func(a, b FreedAddress) int { return cmp.Compare(a.Turn, b.Turn) })
	return list, err
}

// validatePod holds the record of an ordinary pod to its own rules.
func validatePod(ep *endpoint.Endpoint) error {
	if w := endpoint.PodHostLink(ep.ContainerID, ep.IfName); ep.HostLink != w {
		return fmt.Errorf("host link is %q, want %q", ep.HostLink, w)
	}
	switch {
	case ep.PeerLink != ep.IfName:
		return fmt.Errorf("peer link is %q, want %q", ep.PeerLink, ep.IfName)
	case ep.Binding != nil:
		return errors.New("is an ordinary pod and bound")
	case (ep.Pool == "") == (ep.IPAM == ""):
		return fmt.Errorf("has pool %q and ipam %q, want one of them", ep.Pool, ep.IPAM)
	case !ep.Subnet.IsValid() || !ep.Subnet.Addr().Is4() || ep.Subnet != ep.Subnet.Masked():
		return fmt.Errorf("subnet %q is not an IPv4 prefix", ep.Subnet)
	case !ep.Address.Is4() || !ep.Subnet.Contains(ep.Address) || ep.Address == ep.Gateway:
		return fmt.Errorf("address %q with gateway %q is not one of subnet %s", ep.Address, ep.Gateway, ep.Subnet)
	}
	return endpoint.ValidateGateway(ep.Subnet, ep.Gateway)
}
