package session

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"fmt"
	"net/netip"
	"time"

	data "mknet/shim/pump"
	"mknet/shim/tun"
	"mknet/spec/pump"
)

// Carry runs the data plane over the session's lanes until it ends and returns
// why, as pump.Run of mknet/shim/pump does. It takes ownership of the lanes; the
// queues stay the caller's. maxMessageBytes is 0 for a stream. Both ends of a
// session call it.
//
// When ctx ends with ErrDisplaced as its cause, the peer is told so.
func (s *Session) Carry(ctx context.Context, queues []*tun.Queue, maxMessageBytes int, counters *data.Counters) error {
	lanes, err := s.dataLanes()
	if err != nil {
		return errors.Join(err, s.Close())
	}
	carry, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { cancel(farewell(context.Cause(ctx))) })
	defer stop()
	return data.Run(carry, s.dataConfig(maxMessageBytes, counters), queues, lanes)
}

// farewell says to the data plane why it has to end.
func farewell(cause error) error {
	if errors.Is(cause, ErrDisplaced) {
		return &data.StopError{Reason: pump.Displaced}
	}
	return cause
}

// dataConfig is the data plane's view of what both ends agreed on.
func (s *Session) dataConfig(maxMessageBytes int, counters *data.Counters) data.Config {
	lanes := s.Ack.Lanes
	c := data.Config{
		MTUBytes: s.Config.MTUBytes, DeadAfter: time.Duration(s.Config.Keepalive), MaxMessageBytes: maxMessageBytes, Counters: counters,
		LocalOffloads: s.Config.Offloads, PeerOffloads: s.Ack.Offloads,
		Grant: s.Config.Windows[:lanes], Granted: s.Ack.Windows,
		// The shim knows the one address that the child may use.
		AllowedSource: s.Config.Address.Addr(),
	}
	if s.role == pump.RoleAgent {
		c.LocalOffloads, c.PeerOffloads = c.PeerOffloads, c.LocalOffloads
		c.Grant, c.Granted = c.Granted, c.Grant
		c.AllowedSource = netip.Addr{} // the primary speaks for the whole world
	}
	return c
}

func (s *Session) dataLanes() ([]data.Lane, error) {
	lanes := make([]data.Lane, len(s.Lanes))
	for i, l := range s.Lanes {
		lanes[i].Conn = l.Conn
		if l.Send == nil {
			continue
		}
		var err error
		if lanes[i].Seal, err = newAEAD(l.Send); err != nil {
			return nil, err
		}
		if lanes[i].Open, err = newAEAD(l.Receive); err != nil {
			return nil, err
		}
	}
	return lanes, nil
}

// newAEAD is AES-256-GCM with the usual sizes.
func newAEAD(k *Key) (cipher.AEAD, error) {
	block, err := aes.NewCipher(k[:])
	if err != nil {
		return nil, fmt.Errorf("data key: %w", err)
	}
	return cipher.NewGCM(block)
}
