package netns

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NetlinkTimeout bounds the wait for one answer of the kernel on every netlink
// socket of the daemon.
const NetlinkTimeout = 10 * time.Second

// NewHandle returns a route netlink handle in the namespace of the calling
// thread, with deadlines. The caller closes it.
func NewHandle() (*netlink.Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	if err := h.SetSocketTimeout(NetlinkTimeout); err != nil {
		h.Close()
		return nil, fmt.Errorf("netlink socket: set a time-out: %w", err)
	}
	return h, nil
}

// dumpAttempts bounds how often a dump is repeated that the kernel reports as
// inconsistent because something changed meanwhile (NLM_F_DUMP_INTR): on a node
// links come and go at any time.
const dumpAttempts = 20

// Dump repeats a netlink dump that was interrupted. Every list from the kernel is
// read through it.
func Dump[T any](f func() (T, error)) (T, error) {
	for attempt := 1; ; attempt++ {
		v, err := f()
		if attempt == dumpAttempts || !errors.Is(err, netlink.ErrDumpInterrupted) {
			return v, err
		}
	}
}
