package topo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// watchQuiet is how long the host must be quiet before WatchEgress reports, and
// watchLatest how long it waits at most: a routing daemon may never be quiet.
const (
	watchQuiet  = 200 * time.Millisecond
	watchLatest = 2 * time.Second

	watchBufferBytes = 1 << 20

	// A subscription that broke is made again after watchAgain, then after twice as
	// long, at most watchAgainMost.
	watchAgain     = time.Second
	watchAgainMost = 30 * time.Second
)

// WatchEgress reports that something about the host's links, addresses or routes
// has changed, leaving aside what belongs to endpoints: time to ask Egress and
// Overlaps again. Reports are coalesced; the channel is closed once ctx ends. Where the
// subscription breaks, broken is told why, it is made again, and that is reported as a
// change: some may have been missed.
func (h *Host) WatchEgress(ctx context.Context, broken func(error)) (<-chan struct{}, error) {
	w, err := h.subscribe(ctx)
	if err != nil {
		return nil, err
	}
	changed := make(chan struct{}, 1)
	events := make(chan struct{}, 1)
	go func() {
		defer close(events)
		h.watch(ctx, w, events, broken)
	}()
	go func() {
		defer close(changed)
		debounce(events, changed)
	}()
	return changed, nil
}

// watch reads one subscription after the other until ctx ends.
func (h *Host) watch(ctx context.Context, w *egressWatch, events chan<- struct{}, broken func(error)) {
	for {
		err := h.read(ctx, w, events)
		w.close()
		for wait := watchAgain; ctx.Err() == nil; wait = min(2*wait, watchAgainMost) {
			broken(err)
			select {
			case <-ctx.Done():
			case <-time.After(wait):
			}
			if w, err = h.subscribe(ctx); err == nil {
				break
			}
		}
		if ctx.Err() != nil {
			if err == nil {
				w.close()
			}
			return
		}
		post(events)
	}
}

// egressWatch is one subscription.
type egressWatch struct {
	socket *nl.NetlinkSocket
	own    map[int]bool // indices of the endpoints' links
	stop   func() bool
}

func (w *egressWatch) close() {
	if w.stop() {
		w.socket.Close()
	}
}

func (h *Host) subscribe(ctx context.Context) (*egressWatch, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("watch the egress: subscribe: %w", err)
	}
	// A burst of a thousand messages is to be read, not lost.
	if err := socket.SetReceiveBufferSize(watchBufferBytes, true); err != nil {
		socket.Close()
		return nil, fmt.Errorf("watch the egress: enlarge the buffer: %w", err)
	}
	own, _, err := h.links(ctx) // after subscribing: nothing is missed in between
	if err != nil {
		socket.Close()
		return nil, fmt.Errorf("watch the egress: %w", err)
	}
	return &egressWatch{socket: socket, own: own, stop: context.AfterFunc(ctx, socket.Close)}, nil // closing wakes the reader
}

// read turns messages into events until the subscription breaks or its socket is closed.
func (h *Host) read(ctx context.Context, w *egressWatch, events chan<- struct{}) error {
	for {
		messages, _, err := w.socket.Receive()
		if errors.Is(err, unix.EINTR) {
			continue
		}
		lost := errors.Is(err, unix.ENOBUFS)
		if lost { // links may have gone, and their indices be used again
			w.own, _, err = h.links(ctx)
		}
		if err != nil {
			return fmt.Errorf("watch the egress: %w", err)
		}
		interesting := lost
		for _, m := range messages {
			if foreignChange(m.Header.Type, m.Data, w.own) {
				interesting = true
			}
		}
		if interesting {
			post(events)
		}
	}
}

// post leaves an event where none is waiting.
func post(events chan<- struct{}) {
	select {
	case events <- struct{}{}:
	default:
	}
}

// foreignChange reports whether a message is about something that is not an
// endpoint's, and keeps own, the indices of the endpoints' links, up to date.
func foreignChange(kind uint16, data []byte, own map[int]bool) bool {
	switch kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		l, err := netlink.LinkDeserialize(nil, data)
		if err != nil {
			return true
		}
		a := l.Attrs()
		if own[a.Index] || isOwnName(a) {
			own[a.Index] = true
			if kind == unix.RTM_DELLINK {
				delete(own, a.Index)
			}
			return false
		}
		return true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if len(data) < unix.SizeofIfAddrmsg {
			return true
		}
		return !own[int(nl.DeserializeIfAddrmsg(data).Index)]
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return !own[routeIndex(data)]
	}
	return false
}

// isOwnName goes by kind and name: the first message about a link of ours comes
// before its alias is set. A foreign veth named so is taken for ours here, and
// only here: at worst a change of it is not reported.
func isOwnName(a *netlink.LinkAttrs) bool {
	_, marked := parseMark(a.Alias)
	return marked || strings.HasPrefix(a.Name, endpoint.HostLinkPrefix) && len(a.Name) == len(endpoint.HostLinkPrefix)+11
}

func routeIndex(data []byte) int {
	if len(data) < unix.SizeofRtMsg {
		return 0
	}
	attrs, err := nl.ParseRouteAttr(data[unix.SizeofRtMsg:])
	if err != nil {
		return 0
	}
	for _, a := range attrs {
		if a.Attr.Type == unix.RTA_OIF && len(a.Value) == 4 {
			return int(nl.NativeEndian().Uint32(a.Value))
		}
	}
	return 0
}

// links returns the indices of all links with our mark, and whether an index is no
// link's at all.
func (h *Host) links(ctx context.Context) (own map[int]bool, gone func(index int) bool, err error) {
	links, err := dump(ctx, h.lists.LinkList)
	if err != nil {
		return nil, nil, fmt.Errorf("list links: %w", err)
	}
	own, all := map[int]bool{}, map[int]bool{}
	for _, l := range links {
		all[l.Attrs().Index] = true
		if _, ours := parseMark(l.Attrs().Alias); ours {
			own[l.Attrs().Index] = true
		}
	}
	return own, func(index int) bool { return !all[index] }, nil
}

// debounce passes an event on once there has been none for watchQuiet, at the
// latest watchLatest after the first.
func debounce(events <-chan struct{}, changed chan<- struct{}) {
	for range events {
		latest := time.NewTimer(watchLatest)
		quiet := time.NewTimer(watchQuiet)
	wait:
		for {
			select {
			case _, open := <-events:
				if !open {
					break wait
				}
				quiet.Reset(watchQuiet)
			case <-quiet.C:
				break wait
			case <-latest.C:
				break wait
			}
		}
		latest.Stop()
		quiet.Stop()
		select {
		case changed <- struct{}{}:
		default: // the last report has not been taken yet
		}
	}
}
