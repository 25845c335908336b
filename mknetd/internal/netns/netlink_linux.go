package netns

import (
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
