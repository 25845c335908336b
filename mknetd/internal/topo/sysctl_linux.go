package topo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/vishvananda/netlink"
)

// present reports whether the device of a sysctl is there to have it. That of a
// shared one is not ours.
func (o *object) present(s site) (bool, error) {
	if o.Shared {
		l, err := s.link(o.Link)
		return l != nil, err
	}
	l, err := o.device(s)
	return l != nil, err
}

func ensureSysctl(_ context.Context, o *object, s site) error {
	if there, err := o.present(s); err != nil {
		return err
	} else if !there {
		return fmt.Errorf("no interface %s", o.Link)
	}
	have, err := s.readSysctl(o.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && o.Optional:
		return nil
	case err != nil:
		return err
	case have == o.Value:
		return nil
	}
	o.changed = true
	return s.writeSysctl(o.Path, o.Value)
}

func checkSysctl(_ context.Context, o *object, s site) ([]string, error) {
	there, err := o.present(s)
	if err != nil {
		return nil, err
	}
	if !there {
		if o.Shared {
			return []string{"interface " + o.Link + " is missing"}, nil
		}
		return nil, nil // the device's own object says so
	}
	have, err := s.readSysctl(o.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && o.Optional:
		return nil, nil
	case errors.Is(err, fs.ErrNotExist):
		return []string{"missing"}, nil
	case err != nil:
		return nil, err
	case have != o.Value:
		return []string{fmt.Sprintf("is %s, want %s", have, o.Value)}, nil
	}
	return nil, nil
}

// ensureForward switches forwarding on in the namespace. Who finds it off notes
// that on its own veth peer before it changes anything, so that the note cannot
// be lost and ends with the namespace.
func ensureForward(_ context.Context, o *object, s site) error {
	peer, err := o.required(s)
	if err != nil {
		return err
	}
	have, err := s.readSysctl(o.Path)
	if err != nil || have == o.Value {
		return err
	}
	if err := rewriteMark(s, peer, mark{generation: o.ep.Generation, restoreForward: true}); err != nil {
		return err
	}
	o.changed = true
	return s.writeSysctl(o.Path, o.Value)
}

func checkForward(_ context.Context, o *object, s site) ([]string, error) {
	have, err := s.readSysctl(o.Path)
	if err != nil || have == o.Value {
		return nil, err
	}
	return []string{fmt.Sprintf("is %s, want %s", have, o.Value)}, nil
}

// removeForward hands the note to another attachment of the namespace, and
// switches forwarding off again where there is none.
func removeForward(ctx context.Context, o *object, s site) error {
	peer, err := o.device(s)
	if err != nil || peer == nil {
		return err
	}
	m, _ := parseMark(peer.Attrs().Alias)
	if !m.restoreForward {
		return nil
	}
	links, err := dump(ctx, s.route.LinkList)
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	if heir, m := nextPeer(links, o); heir != nil {
		m.restoreForward = true
		err = rewriteMark(s, heir, m)
	} else {
		o.changed = true
		err = s.writeSysctl(o.Path, "0")
	}
	if err != nil {
		return err
	}
	return rewriteMark(s, peer, mark{generation: o.ep.Generation})
}

// nextPeer returns a veth peer of another attachment.
func nextPeer(links []netlink.Link, o *object) (netlink.Link, mark) {
	for _, l := range links {
		if m, ok := parseMark(l.Attrs().Alias); ok && l.Type() == "veth" && m.generation != o.ep.Generation {
			return l, m
		}
	}
	return nil, mark{}
}
