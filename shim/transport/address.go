package transport

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultPort is where an agent listens. It is below 1024 so that only a
// privileged process of the child can take its place.
const DefaultPort = 1023

// Schemes of an address.
const (
	schemeVsock  = "vsock"
	schemeHybrid = "hvsock"
	schemeUnix   = "unix"
)

// anyCID is VMADDR_CID_ANY: every address of this kernel.
const anyCID uint32 = unix.VMADDR_CID_ANY

// Address is one parsed URL.
type Address struct {
	scheme      string
	cid, port   uint32
	path        string
	multikernel bool
}

// AddressError says what is wrong with a URL.
type AddressError struct{ URL, Reason string }

func (e *AddressError) Error() string { return fmt.Sprintf("address %q: %s", e.URL, e.Reason) }

// Parse reads a URL as the package comment has it. The error is an
// *AddressError.
func Parse(raw string) (Address, error) {
	bad := func(format string, args ...any) (Address, error) {
		return Address{}, &AddressError{URL: raw, Reason: fmt.Sprintf(format, args...)}
	}
	u, err := url.Parse(raw)
	if err != nil {
		return bad("is not a URL")
	}
	if u.User != nil || u.Fragment != "" || u.Opaque != "" {
		return bad("may have no user, no fragment and must have \"//\"")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return bad("options are malformed")
	}
	a := Address{scheme: u.Scheme}
	for key, values := range query {
		if a.scheme != schemeVsock || key != "transport" || len(values) != 1 || values[0] != "multikernel" {
			return bad("unknown option %q, only vsock has one: transport=multikernel", key)
		}
		a.multikernel = true
	}
	switch a.scheme {
	case schemeVsock:
		if u.Path != "" {
			return bad("vsock has no path, it is vsock://CID:PORT")
		}
		if a.cid, err = parseCID(u.Hostname()); err != nil {
			return bad("CID %q: must be a number or \"any\"", u.Hostname())
		}
		if a.port, err = parsePort(u.Port()); err != nil {
			return bad("%v", err)
		}
	case schemeHybrid:
		i := strings.LastIndexByte(u.Path, ':')
		if u.Host != "" || i < 0 {
			return bad("must be hvsock:///path:PORT")
		}
		a.path = u.Path[:i]
		if a.port, err = parsePort(u.Path[i+1:]); err != nil {
			return bad("%v", err)
		}
	case schemeUnix:
		if u.Host != "" {
			return bad("must be unix:///path")
		}
		a.path = u.Path
	default:
		return bad("unknown scheme %q, know vsock, hvsock and unix", u.Scheme)
	}
	if a.scheme != schemeVsock {
		// 107 bytes: sun_path without its final zero, unix(7).
		if !strings.HasPrefix(a.path, "/") || len(a.path) < 2 || len(a.path) > 107 || strings.ContainsRune(a.path, 0) {
			return bad("path must be absolute and at most 107 bytes long")
		}
	}
	return a, nil
}

func parseCID(s string) (uint32, error) {
	if s == "any" {
		return anyCID, nil
	}
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}

func parsePort(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == 0 || n == uint64(uint32(unix.VMADDR_PORT_ANY)) {
		return 0, fmt.Errorf("port %q: must be a number above 0", s)
	}
	return uint32(n), nil
}

// String is the URL.
func (a Address) String() string {
	switch a.scheme {
	case schemeVsock:
		cid := strconv.FormatUint(uint64(a.cid), 10)
		if a.cid == anyCID {
			cid = "any"
		}
		s := fmt.Sprintf("vsock://%s:%d", cid, a.port)
		if a.multikernel {
			s += "?transport=multikernel"
		}
		return s
	case schemeHybrid:
		return (&url.URL{Scheme: schemeHybrid, Path: fmt.Sprintf("%s:%d", a.path, a.port)}).String()
	}
	return (&url.URL{Scheme: a.scheme, Path: a.path}).String()
}

// Multikernel reports whether the connection has the multikernel transport's
// limits: small messages and no flow control of its own.
func (a Address) Multikernel() bool { return a.multikernel }
