package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

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
	list, err := netns.Dump(d.listQdiscs)
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
// at that very moment may be missed; Check then finds it. What the kernel refuses is
// asked for again until it answers. The channel is closed once ctx ends; the caller
// drains it.
func (d *Datapath) FollowShaping(ctx context.Context) (<-chan string, error) {
	socket, err := subscribeTC()
	if err != nil {
		return nil, err
	}
	events, names := make(chan struct{}, 1), make(chan string)
	events <- struct{}{} // what has changed since Open
	go func() {
		defer close(events)
		d.hearTC(ctx, socket, events)
	}()
	go func() {
		defer close(names)
		d.reportShaped(ctx, events, names)
	}()
	return names, nil
}

// reportShaped sends the names of links whose shaping has changed, after each event.
func (d *Datapath) reportShaped(ctx context.Context, events <-chan struct{}, names chan<- string) {
	for range events { // many messages are one event
		changed, err := d.refreshShaped()
		for failures := (retries{log: d.cfg.Log}); err != nil; changed, err = d.refreshShaped() {
			if !failures.wait(ctx, err) {
				return
			}
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
}

// subscribeTC opens a socket that gets the messages about queueing disciplines.
func subscribeTC() (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_TC)
	if err != nil {
		return nil, fmt.Errorf("watch queueing disciplines: subscribe: %w", err)
	}
	if err := socket.SetReceiveBufferSize(tcBufferBytes, true); err != nil {
		socket.Close()
		return nil, fmt.Errorf("watch queueing disciplines: enlarge the buffer: %w", err)
	}
	return socket, nil
}

// hearTC turns messages about queueing disciplines into events until ctx ends. A
// subscription that breaks is made again, and an event stands for what was missed.
func (d *Datapath) hearTC(ctx context.Context, socket *nl.NetlinkSocket, events chan<- struct{}) {
	failures := retries{log: d.cfg.Log}
	for {
		began := time.Now()
		stop := context.AfterFunc(ctx, socket.Close) // wakes the reader
		err := readTC(socket, events)
		if stop() {
			socket.Close()
		}
		if time.Since(began) > retryMost {
			failures = retries{log: d.cfg.Log}
		}
		for err != nil {
			if !failures.wait(ctx, err) {
				return
			}
			socket, err = subscribeTC()
		}
		post(events)
	}
}

// readTC turns messages about queueing disciplines into events until the socket is
// closed or breaks; it returns why.
func readTC(socket *nl.NetlinkSocket, events chan<- struct{}) error {
	for {
		messages, _, err := socket.Receive()
		interesting := errors.Is(err, unix.ENOBUFS) // messages were lost
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil && !interesting:
			return fmt.Errorf("watch queueing disciplines: receive: %w", err)
		}
		for _, m := range messages {
			interesting = interesting || m.Header.Type == unix.RTM_NEWQDISC || m.Header.Type == unix.RTM_DELQDISC
		}
		if interesting {
			post(events)
		}
	}
}

func post(events chan<- struct{}) {
	select {
	case events <- struct{}{}:
	default: // one is waiting already
	}
}

// How long there is between two tries; it doubles.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// retries are the tries of one thing that fails.
type retries struct {
	log   *slog.Logger
	pause time.Duration // before the last try
	said  string        // what was logged last
}

// wait logs err, where that is not what was logged last, and returns when it is time
// for another try; false means that ctx has ended.
func (r *retries) wait(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	if err.Error() != r.said {
		r.log.Error("the shaping of links is not known, it is asked for again", "err", err)
		r.said = err.Error()
	}
	r.pause = min(max(2*r.pause, retryFirst), retryMost)
	timer := time.NewTimer(r.pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
