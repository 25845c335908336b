// Package pump carries packets between a TUN and the connection to the other
// kernel: the data plane of mk-shim and mk-agent, which run the same code. It
// implements spec/pump-frames.md.
//
// It opens no device and dials nothing: it is given queues and the connections
// of a session whose handshake is done, and runs until one of them fails, the
// peer leaves or its context ends. Packets that cannot be carried are counted and
// dropped; memory is bounded by the buffers of the session, whatever the peer
// sends.
package pump

import (
	"context"
	"crypto/cipher"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"mknet/shim/tun"
	wire "mknet/spec/pump"
)

// DefaultDeadAfter is the silence after which a peer is dead.
const DefaultDeadAfter = 5 * time.Second

// CloseGrace bounds how long Run waits at its end for the peer to read the
// reason; DeadAfter is its upper limit.
const CloseGrace = 250 * time.Millisecond

// Lane is one connection of a session. Lane 0 carries bulk traffic; the last one
// carries the rest and the control frames.
type Lane struct {
	Conn net.Conn
	// Seal and Open encrypt and decrypt this lane's frames, one key for each lane
	// and direction: nonces count from 0 with every Run. Both or neither. The nonce
	// must have 12 bytes and the tag 16, as AES-GCM and ChaCha20-Poly1305 have.
	Seal, Open cipher.AEAD
}

// Config says how a session runs. Both ends must agree on sealing and on the
// number of lanes.
type Config struct {
	MTUBytes int // of the link: longer packets from the peer are dropped

	// LocalOffloads is what this side's TUN gives (see tun.Queue.ProbeOffloads),
	// PeerOffloads what the peer's does. The TUN is set to what both have.
	LocalOffloads, PeerOffloads wire.Offloads

	// Grant is what this side lets the peer have under way, Granted what the peer
	// lets this side have, one a lane; nil means wire.BulkWindow for the first lane
	// and wire.LatencyWindow for the second.
	Grant, Granted []wire.Window

	DeadAfter     time.Duration // silence after which the peer is dead; 0 means DefaultDeadAfter
	AllowedSource netip.Addr    // the only source address the peer may use; the zero Addr allows any

	// MaxMessageBytes bounds a single write for a transport of messages that may
	// find no room (EAGAIN, ENOBUFS); it is then tried again with a bounded
	// back-off. 0 means a stream.
	MaxMessageBytes int

	Counters *Counters // outlives the session; nil means nobody looks
}

// Run carries packets until the session ends and returns why: a *PeerClosedError,
// *DeadPeerError, *ProtocolError, *LaneError or *QueueError, or the cause of ctx
// when that ended. A cause that is a *StopError is told to the peer, any other is
// told as a shutdown.
//
// Packets of queue i leave by lane i, those of further queues by the last lane;
// packets of lane i go to queue i, or the last one.
//
// Run takes ownership of the lanes' connections and closes them, also on error.
// The queues stay the caller's and stay open: another Run may use them at once.
// No two may use a queue at the same time. After a *QueueError close all queues
// and attach again, since the indices of those that are left have moved.
func Run(ctx context.Context, cfg Config, queues []*tun.Queue, lanes []Lane) error {
	devices := make([]device, len(queues))
	for i, q := range queues {
		devices[i] = q
	}
	return run(ctx, cfg, devices, lanes)
}

func run(ctx context.Context, cfg Config, queues []device, lanes []Lane) error {
	s, err := newSession(cfg, queues, lanes)
	if err != nil {
		for _, l := range lanes {
			if l.Conn != nil {
				err = errors.Join(err, l.Conn.Close())
			}
		}
		return fmt.Errorf("pump: %w", err)
	}
	return s.run(ctx)
}

// validate fills in defaults.
func (c *Config) validate(lanes int) error {
	if c.MTUBytes < 68 || c.MTUBytes > wire.MaxPacketBytes { // RFC 791: every link carries 68 bytes
		return fmt.Errorf("mtu of %d bytes: must be from 68 to %d", c.MTUBytes, wire.MaxPacketBytes)
	}
	if c.DeadAfter == 0 {
		c.DeadAfter = DefaultDeadAfter
	}
	if c.DeadAfter < wire.MinKeepalive {
		return fmt.Errorf("dead after %s: must be at least %s", c.DeadAfter, wire.MinKeepalive)
	}
	if c.MaxMessageBytes < 0 {
		return fmt.Errorf("messages of %d bytes", c.MaxMessageBytes)
	}
	if c.Counters == nil {
		c.Counters = new(Counters)
	}
	for _, w := range []*[]wire.Window{&c.Grant, &c.Granted} {
		if *w == nil {
			*w = []wire.Window{wire.BulkWindow, wire.LatencyWindow}[:lanes]
		}
		if len(*w) != lanes {
			return fmt.Errorf("%d credit windows for %d lanes", len(*w), lanes)
		}
		for _, w := range *w {
			if err := w.Validate(); err != nil {
				return err
			}
		}
	}
	return nil
}
