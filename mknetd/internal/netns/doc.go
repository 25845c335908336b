// Package netns opens, identifies, enters and makes network namespaces. It is
// the only package of mknetd that calls setns, unshare or LockOSThread.
//
// A namespace is identified by boot ID and SO_NETNS_COOKIE (design, section 2);
// paths, PIDs and inodes are reused by the kernel. The host's own namespace is
// refused wherever a namespace comes from outside.
package netns

import "errors"

// MaxPathBytes bounds the path of a namespace that a caller gives (PATH_MAX).
const MaxPathBytes = 4095

var (
	// ErrHostNamespace is returned by Open and FromFile for the namespace that the
	// daemon itself runs in. Nothing is ever built there: answer with an error.
	ErrHostNamespace = errors.New("is the host's own network namespace")
	// ErrNotNamespace is returned by Open and FromFile for anything that is not a
	// network namespace: a plain file, a folder, a namespace of another kind. For
	// DEL it means that the namespace is gone.
	ErrNotNamespace = errors.New("is not a network namespace")
	// ErrGone is returned by Find when no file of the host leads to the namespace
	// any more. Its links went with it, or are removed from the host's side.
	ErrGone = errors.New("network namespace is gone")
	// ErrForeign is returned by Make when something of the wanted name stands under
	// /run/netns, and by FindOwned when it is not ours. It is left alone.
	ErrForeign = errors.New("belongs to somebody else")
)
