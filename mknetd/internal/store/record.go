package store

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"

	"mknet/spec/endpoint"
)

// A stored value is: one byte recordVersion, the CRC32C of bucket, key and
// payload (4 bytes, big endian), the payload. With bucket and key under the
// checksum, a value that ends up in a wrong place is noticed too.
const (
	recordVersion = 1
	headerBytes   = 5
	// MaxRecordBytes bounds one record: the longest endpoint (every
	// identifier at its limit, 16 search domains, a page of faults) is far below.
	MaxRecordBytes = 64 << 10
	// MaxDocumentBytes bounds one document: more than a call of the API can carry.
	MaxDocumentBytes = 1 << 20
)

// maxBytes is the bound of what a bucket holds.
func maxBytes(bucket []byte) int {
	if bytes.HasPrefix(bucket, []byte("documents/")) {
		return MaxDocumentBytes
	}
	return MaxRecordBytes
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(bucket, key, payload []byte) uint32 {
	// Lengths keep the three parts apart.
	head := binary.BigEndian.AppendUint32(nil, uint32(len(bucket)))
	head = append(head, bucket...)
	head = binary.BigEndian.AppendUint32(head, uint32(len(key)))
	head = append(head, key...)
	return crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, payload)
}

// seal wraps a payload for storing.
func seal(bucket, key, payload []byte) []byte {
	out := make([]byte, 0, headerBytes+len(payload))
	out = append(out, recordVersion)
	out = binary.BigEndian.AppendUint32(out, checksum(bucket, key, payload))
	return append(out, payload...)
}

// unseal checks a stored value and returns its payload, which lies in the same
// memory. Every fault is a *CorruptError.
func (s *Store) unseal(bucket, key, value []byte) ([]byte, error) {
	switch {
	case value == nil:
		return nil, s.corrupt(bucket, key, "is missing")
	case len(value) < headerBytes:
		return nil, s.corrupt(bucket, key, "has %d bytes, a record has at least %d", len(value), headerBytes)
	case len(value) > headerBytes+maxBytes(bucket):
		return nil, s.corrupt(bucket, key, "has %d bytes, a record has at most %d", len(value), headerBytes+maxBytes(bucket))
	case value[0] != recordVersion:
		return nil, s.corrupt(bucket, key, "has record version %d, want %d", value[0], recordVersion)
	}
	payload := value[headerBytes:]
	if got, want := checksum(bucket, key, payload), binary.BigEndian.Uint32(value[1:]); got != want {
		return nil, s.corrupt(bucket, key, "checksum is %08x, its content has %08x", want, got)
	}
	return payload, nil
}

func (s *Store) corrupt(bucket, key []byte, format string, args ...any) *CorruptError {
	return &CorruptError{Path: s.path, Bucket: string(bucket), Key: printable(key), Offset: -1, raw: bytes.Clone(key), Why: fmt.Sprintf(format, args...)}
}

// printable shows a key that may be text or binary, bounded.
func printable(key []byte) string {
	if len(key) > 64 {
		key = key[:64]
	}
	for _, c := range key {
		if c != 0 && (c < ' ' || c > '~') {
			return hex.EncodeToString(key)
		}
	}
	return fmt.Sprintf("%q", strings.ReplaceAll(string(key), "\x00", "/"))
}

// encodeEndpoint checks a record as Open would and makes its payload.
func (s *Store) encodeEndpoint(ep *endpoint.Endpoint) ([]byte, error) {
	if err := validate(ep, s.pools); err != nil {
		return nil, &InvalidError{Generation: ep.Generation, Why: err.Error()}
	}
	doc, err := json.Marshal(ep)
	if err != nil {
		return nil, &InvalidError{Generation: ep.Generation, Why: err.Error()}
	}
	if len(doc) > MaxRecordBytes {
		return nil, &InvalidError{Generation: ep.Generation, Why: fmt.Sprintf("has %d bytes, at most %d can be stored", len(doc), MaxRecordBytes)}
	}
	return doc, nil
}

// decodeEndpoint reads and validates one record of the endpoints bucket.
func (s *Store) decodeEndpoint(key, value []byte) (*endpoint.Endpoint, error) {
	doc, err := s.unseal(bucketEndpoints, key, value)
	if err != nil {
		return nil, err
	}
	ep, err := parseEndpoint(doc, s.pools)
	if err != nil {
		return nil, s.corrupt(bucketEndpoints, key, "%v", err)
	}
	if !bytes.Equal(key, ep.Generation[:]) {
		return nil, s.corrupt(bucketEndpoints, key, "describes endpoint %s", ep.Generation)
	}
	return ep, nil
}

// parseEndpoint reads a payload. A field that this version does not know is an
// error: writing the record back would lose it.
func parseEndpoint(doc []byte, pools endpoint.Pools) (*endpoint.Endpoint, error) {
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.DisallowUnknownFields()
	ep := new(endpoint.Endpoint)
	if err := dec.Decode(ep); err != nil {
		return nil, fmt.Errorf("is not an endpoint record: %w", err)
	}
	if dec.InputOffset() != int64(len(doc)) {
		return nil, errors.New("is followed by other data")
	}
	if err := validate(ep, pools); err != nil {
		return nil, err
	}
	return ep, nil
}

// HasSlot reports whether the endpoint's addresses come from a slot of the child
// pool. Those of an ordinary pod come from its IPAM.
func HasSlot(ep *endpoint.Endpoint) bool { return ep.Mode == endpoint.Multikernel }

// validate checks what must hold in every record, whatever its state.
func validate(ep *endpoint.Endpoint, pools endpoint.Pools) error {
	if ep.Generation.IsZero() {
		return errors.New("has no generation")
	}
	if err := ep.Attachment.Validate(); err != nil {
		return err
	}
	if !ep.State.Valid() {
		return fmt.Errorf("state %q is not known", ep.State)
	}
	if ep.MTUBytes != 0 || ep.State == endpoint.Ready {
		if ep.MTUBytes < endpoint.MinMTU || ep.MTUBytes > endpoint.MaxMTU {
			return fmt.Errorf("mtu %d is not from %d to %d", ep.MTUBytes, endpoint.MinMTU, endpoint.MaxMTU)
		}
	}
	for name, a := range map[string]endpoint.Access{"hostAccess": ep.HostAccess, "podAccess": ep.PodAccess} {
		if a != "" && a != endpoint.Deny && a != endpoint.Allow {
			return fmt.Errorf("%s %q is not known", name, a)
		}
	}
	if ep.State == endpoint.Ready && (ep.Namespace.Cookie == 0 || ep.Namespace.BootID == "") {
		return errors.New("is READY without a namespace")
	}
	if err := validateBinding(ep); err != nil {
		return err
	}
	switch ep.Mode {
	case endpoint.Multikernel:
		return validateSlot(ep, pools)
	case endpoint.Veth:
		return validatePod(ep)
	}
	return fmt.Errorf("mode %q is not known", ep.Mode)
}

func validateBinding(ep *endpoint.Endpoint) error {
	if ep.Binding == nil {
		return nil
	}
	if ep.State == endpoint.Allocating {
		return errors.New("is bound while ALLOCATING")
	}
	return ep.Binding.Sandbox.Validate()
}

// validateSlot holds addresses to the slot and kernel names to the generation.
func validateSlot(ep *endpoint.Endpoint, pools endpoint.Pools) error {
	if ep.Slot >= pools.Slots() {
		return fmt.Errorf("slot %d: the pool %s has %d", ep.Slot, pools.Child, pools.Slots())
	}
	want := pools.At(ep.Slot)
	got := endpoint.Addresses{Subnet: ep.Subnet, Gateway: ep.Gateway, Child: ep.Address, TransitHost: ep.TransitHost, TransitPeer: ep.TransitPeer}
	if got != want {
		return fmt.Errorf("slot %d: addresses are %+v, want %+v", ep.Slot, got, want)
	}
	if w := ep.Generation.HostLink(); ep.HostLink != w {
		return fmt.Errorf("host link is %q, want %q", ep.HostLink, w)
	}
	if w := ep.Generation.Chain(); ep.Chain != w {
		return fmt.Errorf("chain is %q, want %q", ep.Chain, w)
	}
	digits, ok := strings.CutPrefix(ep.PeerLink, endpoint.PeerLinkPrefix)
	if ep.PeerLink != "" && (!ok || digits == "" || strings.Trim(digits, "0123456789") != "" || len(ep.PeerLink) > endpoint.MaxIfNameBytes) {
		return fmt.Errorf("peer link is %q, want %s and a number", ep.PeerLink, endpoint.PeerLinkPrefix)
	}
	return nil
}
