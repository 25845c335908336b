package api

import (
	"path/filepath"
	"strings"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// maxPathBytes is Linux's PATH_MAX without the closing NUL.
const maxPathBytes = 4095

// maxGC bounds the attachments of one GC: twice the endpoints of the default pool.
const maxGC = 32768

// validateCreate checks every field by itself and fills in defaults. What depends
// on the state of the host is the engine's.
func validateCreate(req *api.CreateRequest) error {
	if err := req.Attachment.Validate(); err != nil {
		return err
	}
	switch req.Mode {
	case "":
		req.Mode = endpoint.Multikernel
	case endpoint.Multikernel, endpoint.Veth:
	default:
		return api.Errorf(api.InvalidArgument, "mode %q: must be %q or %q", clip(string(req.Mode)), endpoint.Multikernel, endpoint.Veth)
	}
	if err := validatePath(req.NetnsPath); err != nil {
		return err
	}
	if err := endpoint.ValidateMTU(req.MTUBytes); err != nil {
		return err
	}
	if req.Address.IsValid() && (!req.Address.Is4() || req.Address.IsUnspecified()) {
		return api.Errorf(api.InvalidArgument, "address %s: must be an IPv4 address", req.Address)
	}
	if err := req.DNS.Validate(); err != nil {
		return err
	}
	for name, a := range map[string]endpoint.Access{"hostAccess": req.HostAccess, "podAccess": req.PodAccess} {
		if a != "" && a != endpoint.Allow && a != endpoint.Deny {
			return api.Errorf(api.InvalidArgument, "%s %q: must be %q or %q", name, clip(string(a)), endpoint.Allow, endpoint.Deny)
		}
	}
	return validatePod(req.Pod)
}

// validatePod bounds what only operators and policy read: a DNS-1123 name has at
// most 253 characters (RFC 1123), and none may break a line of a log.
func validatePod(p endpoint.Pod) error {
	for name, s := range map[string]string{"pod namespace": p.Namespace, "pod name": p.Name, "pod uid": p.UID} {
		if s == "" {
			continue
		}
		if len(s) > 253 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return api.Errorf(api.InvalidArgument, "%s %q: must be printable ASCII without white space, at most 253 bytes", name, clip(s))
		}
	}
	return nil
}

// validatePath checks a namespace path, which may be empty.
func validatePath(p string) error {
	switch {
	case p == "":
		return nil
	case len(p) > maxPathBytes, strings.ContainsRune(p, 0), !filepath.IsAbs(p):
		return api.Errorf(api.InvalidArgument, "netnsPath %q: must be an absolute path of at most %d bytes", clip(p), maxPathBytes)
	}
	return nil
}

// validateSelector checks the parts that are given, and that together they name
// something; named says that something else already does.
func validateSelector(sel *api.Selector, named bool) error {
	if err := validatePath(sel.NetnsPath); err != nil {
		return err
	}
	if sel.Attachment != (endpoint.Attachment{}) {
		if err := sel.Attachment.Validate(); err != nil {
			return err
		}
		named = true
	}
	if n := sel.Namespace; n != nil {
		if n.Cookie == 0 || n.BootID == "" {
			return api.Errorf(api.InvalidArgument, "namespace: needs bootID and cookie")
		}
		if err := endpoint.ValidateIdentifier("namespace bootID", n.BootID); err != nil {
			return err
		}
		named = true
	}
	if !named && sel.Generation.IsZero() && sel.NetnsPath == "" {
		return api.Errorf(api.InvalidArgument, "the endpoint is not named: give a generation, an attachment (network, containerID, ifName) or a namespace")
	}
	return nil
}

func validateGC(req *api.GCRequest) error {
	if err := endpoint.ValidateIdentifier("network", req.Network); err != nil {
		return err
	}
	if req.Valid == nil {
		return nil
	}
	if n := len(*req.Valid); n > maxGC {
		return api.Errorf(api.InvalidArgument, "validAttachments: has %d entries, at most %d are allowed", n, maxGC)
	}
	// An interface name that we would refuse today may still be in the list of a
	// network that others serve too: only what must be matched is checked.
	for _, a := range *req.Valid {
		if a.ContainerID == "" || a.IfName == "" {
			return api.Errorf(api.InvalidArgument, "validAttachments: every entry needs containerID and ifName")
		}
	}
	return nil
}
