package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/endpoint"
)

// member is one member of a JSON object.
type member struct {
	key string
	raw json.RawMessage
}

// object splits a JSON object into its members, in order, repeated keys included:
// encoding/json would take the last one and would not tell.
func object(data []byte) ([]member, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	start, err := dec.Token()
	if err != nil {
		return nil, fmt.Errorf("network configuration is no JSON: %w", err)
	}
	if start != json.Delim('{') {
		return nil, errors.New("network configuration is no JSON object")
	}
	var members []member
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("network configuration is no JSON: %w", err)
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, fmt.Errorf("network configuration is no JSON: %w", err)
		}
		name, _ := key.(string) // a member's name is a string, else Token had failed
		members = append(members, member{name, raw})
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("network configuration is no JSON: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("network configuration goes on after the JSON object")
	}
	return members, nil
}

func str(raw json.RawMessage, to *string) error {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return errors.New("must be a string")
	}
	*to = s
	return nil
}

func boolean(raw json.RawMessage, to *bool) error {
	switch string(raw) {
	case "true":
		*to = true
	case "false":
		*to = false
	default:
		return errors.New("must be true or false")
	}
	return nil
}

// absolute reads a path. Symbolic links are a matter of whoever opens it.
func absolute(raw json.RawMessage, to *string) error {
	var s string
	if err := str(raw, &s); err != nil {
		return err
	}
	if !filepath.IsAbs(s) || filepath.Clean(s) != s || s == "/" || strings.ContainsRune(s, 0) {
		return errors.New("must be an absolute path without \".\", \"..\" and double slashes")
	}
	*to = s
	return nil
}

func access(raw json.RawMessage, to *endpoint.Access) error {
	var s string
	if err := str(raw, &s); err != nil {
		return err
	}
	switch a := endpoint.Access(s); a {
	case endpoint.Deny, endpoint.Allow:
		*to = a
		return nil
	}
	return errors.New("must be \"deny\" or \"allow\"")
}

// maxSocketPath is what fits into sun_path with its final zero byte, unix(7).
const maxSocketPath = 107

func (p *parser) setSocket(raw json.RawMessage) error {
	var path string
	if err := absolute(raw, &path); err != nil {
		return err
	}
	if len(path) > maxSocketPath {
		return fmt.Errorf("has %d bytes, a Unix socket's path has at most %d", len(path), maxSocketPath)
	}
	p.Daemon.Network, p.Daemon.Address = "unix", path
	return nil
}

func (p *parser) setEndpoint(raw json.RawMessage) error {
	var s string
	if err := str(raw, &s); err != nil {
		return err
	}
	if path, ok := strings.CutPrefix(s, "unix://"); ok {
		quoted, err := json.Marshal(path)
		if err != nil {
			return err
		}
		return p.setSocket(quoted)
	}
	addr, ok := strings.CutPrefix(s, "tcp://")
	if !ok {
		return errors.New("must begin with unix:// or tcp://")
	}
	host, port, ok := cutLast(addr, ":")
	if !ok || host == "" || port == "" || len(port) > 5 || strings.Trim(port, "0123456789") != "" || len(addr) > 300 || strings.ContainsAny(addr, "/?# \t\r\n") {
		return errors.New("must be tcp://HOST:PORT")
	}
	p.Daemon.Network, p.Daemon.Address = "tcp", addr
	return nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

func (p *parser) setMode(raw json.RawMessage) error {
	var s string
	if err := str(raw, &s); err != nil {
		return err
	}
	switch m := endpoint.Mode(s); m {
	case endpoint.Multikernel, endpoint.Veth:
		p.Mode = m
		return nil
	}
	return fmt.Errorf("must be %q or %q", endpoint.Multikernel, endpoint.Veth)
}

func (p *parser) setMTU(raw json.RawMessage) error {
	var n int
	if err := json.Unmarshal(raw, &n); err != nil {
		return errors.New("must be a whole number of bytes")
	}
	if n == 0 {
		return nil
	}
	if err := endpoint.ValidateMTU(n); err != nil {
		return fmt.Errorf("must be from %d to %d bytes", endpoint.MinMTU, endpoint.MaxMTU)
	}
	p.MTUBytes = n
	return nil
}

func (p *parser) setIPAM(raw json.RawMessage) error {
	var ipam struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(raw, &ipam); err != nil {
		return errors.New("must be an object with a \"type\"")
	}
	p.IPAM, p.IPAMType = raw, ipam.Type
	return nil
}

func (p *parser) setIPAMLink(raw json.RawMessage) error {
	var name string
	if err := str(raw, &name); err != nil {
		return err
	}
	if len(name) > maxLinkName || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == '/' || r > '~' }) || name == "." || name == ".." {
		return fmt.Errorf("must be the name of a link of this host, of at most %d characters", maxLinkName)
	}
	p.IPAMLink = name
	return nil
}

// maxLinkName is one less than the kernel's IFNAMSIZ (linux/if.h).
const maxLinkName = 15

func (p *parser) setDNS(raw json.RawMessage) error {
	var d endpoint.DNS
	if err := json.Unmarshal(raw, &d); err != nil {
		return errors.New("must be an object with nameservers, domain, search and options")
	}
	if err := d.Validate(); err != nil {
		return err
	}
	p.DNS = d
	return nil
}

// setAttachments reads GC's list. Where a runtime sends both keys the lists are
// joined: what either of them still wants, stays.
func (p *parser) setAttachments(raw json.RawMessage) error {
	var list []struct {
		ContainerID *string `json:"containerID"`
		IfName      *string `json:"ifname"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return errors.New("must be a list of objects with containerID and ifname")
	}
	all := []types.GCAttachment{}
	if p.ValidAttachments != nil {
		all = *p.ValidAttachments
	}
	for i, a := range list {
		if a.ContainerID == nil || a.IfName == nil {
			return fmt.Errorf("item %d lacks containerID or ifname", i)
		}
		all = append(all, types.GCAttachment{ContainerID: *a.ContainerID, IfName: *a.IfName})
	}
	p.ValidAttachments = &all
	return nil
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}

// nearest returns the known key that a mistyped one most probably meant.
func nearest(key string) string {
	best, bestDistance := "", len(key)/3+2
	for known := range keys {
		if d := distance(strings.ToLower(key), strings.ToLower(known)); d < bestDistance || d == bestDistance && best != "" && known < best {
			best, bestDistance = known, d
		}
	}
	return best
}

// distance is the Levenshtein distance, with long strings cut off.
func distance(a, b string) int {
	a, b = a[:min(len(a), 64)], b[:min(len(b), 64)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
