package datapath

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
)

// A redirected packet passes by every queueing discipline of the host links: one
// that somebody put there (CNI's bandwidth plugin, an administrator) would shape
// nothing between the pods of the node. So what a shaped link sends and gets goes
// through the host stack, which passes them. See spec/datapath.md.

// isShaper reports whether a queueing discipline holds packets back, or leads to one
// that does: a root of its own (the kernel's default has handle 0), or the ingress
// one, whose filters CNI's bandwidth plugin leads to an ifb device. A clsact is where
// other people's programs hang, ours too, and holds nothing.
func isShaper(q netlink.Qdisc) bool {
	a := q.Attrs()
	return a.Parent == netlink.HANDLE_ROOT && a.Handle != 0 || q.Type() == "ingress"
}

// readShaped lists the links that are shaped now, by index.
func (d *Datapath) readShaped() (map[int]bool, error) {
	list, err := netns.Dump(func() ([]netlink.Qdisc, error) { return d.links.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("list queueing disciplines: %w", err)
	}
	shaped := map[int]bool{}
	for _, q := range list {
		if isShaper(q) {
			shaped[q.Attrs().LinkIndex] = true
		}
	}
	return shaped, nil
}

// isShaped reports whether the link was shaped when that was last read. It does not
// ask the kernel: a list has the disciplines of all links.
func (d *Datapath) isShaped(ifIndex int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shaped[ifIndex]
}

// refreshShaped reads again which links are shaped, and returns those for which that
// has changed.
func (d *Datapath) refreshShaped() ([]int, error) {
	now, err := d.readShaped()
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var changed []int
	for i := range now {
		if !d.shaped[i] {
			changed = append(changed, i)
		}
	}
	for i := range d.shaped {
		if !now[i] {
			changed = append(changed, i)
		}
	}
	d.shaped = now
	return changed, nil
}

// tcBufferBytes holds the messages of some thousand changes at once.
const tcBufferBytes = 1 << 20

// FollowShaping reports the names of host links of endpoints that somebody began or
// ceased to shape: their entries are to be made again (Ensure). One that is being made
// at that very moment may be missed; Check then finds it. The channel is closed once
// ctx ends or the kernel ends the subscription; the caller drains it.
func (d *Datapath) FollowShaping(ctx context.Context) (<-chan string, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_TC)
	if err != nil {
		return nil, fmt.Errorf("watch queueing disciplines: subscribe: %w", err)
	}
	if err := socket.SetReceiveBufferSize(tcBufferBytes, true); err != nil {
		socket.Close()
		return nil, fmt.Errorf("watch queueing disciplines: enlarge the buffer: %w", err)
	}
	events, names := make(chan struct{}, 1), make(chan string)
	events <- struct{}{} // what has changed since Open
	stop := context.AfterFunc(ctx, socket.Close)
	go func() {
		defer close(events)
		defer func() {
			if stop() {
				socket.Close()
			}
		}()
		readTC(socket, events)
	}()
	go func() {
		defer close(names)
		for range events { // many messages are one event
			changed, err := d.refreshShaped()
			if err != nil {
				d.cfg.Log.Error("watch queueing disciplines", "err", err)
				continue
			}
			for _, i := range changed {
				var at attachmentValue
				found, err := lookup(d.objects.Attachments, uint32(i), &at)
				if err != nil {
					d.cfg.Log.Error("watch queueing disciplines", "link", i, "err", err)
				}
				if !found { // no link of an endpoint, or not yet
					continue
				}
				select {
				case names <- at.link():
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return names, nil
}

// readTC turns messages about queueing disciplines into events until the socket is
// closed.
func readTC(socket *nl.NetlinkSocket, events chan<- struct{}) {
	for {
		messages, _, err := socket.Receive()
		interesting := errors.Is(err, unix.ENOBUFS) // messages were lost
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil && !interesting:
			return
		}
		for _, m := range messages {
			interesting = interesting || m.Header.Type == unix.RTM_NEWQDISC || m.Header.Type == unix.RTM_DELQDISC
		}
		if !interesting {
			continue
		}
		select {
		case events <- struct{}{}:
		default: // one is waiting already
		}
	}
}
