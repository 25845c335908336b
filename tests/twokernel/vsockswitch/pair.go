package vsockswitch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
)

// maxFlows bounds the connections between the two guests; one more is refused.
const maxFlows = 1024

// PairConfig says where the two guests' QEMUs connect and who they are.
type PairConfig struct {
	PrimarySocket, ChildSocket string // Unix sockets, made anew
	PrimaryCID, ChildCID       uint64
	Log                        *slog.Logger
}

// Pair is a running switch between two guests.
type Pair struct {
	primary, child *port

	mu    sync.Mutex
	flows map[flow]struct{}
}

// flow is one connection, whoever began it.
type flow struct{ primaryPort, childPort uint32 }

// port is one guest's side of a Pair.
type port struct {
	pair *Pair
	peer *port
	id   uint64
	// known is the CID by which the other guest knows this one.
	known  uint64
	log    *slog.Logger
	dev    *device // guarded by Pair.mu; nil while the guest is down
	socket *socket
}

// NewPair starts a switch. The guests may come and go in any order.
func NewPair(c PairConfig) (*Pair, error) {
	if c.PrimaryCID <= hostCID || c.ChildCID <= hostCID || c.PrimaryCID == c.ChildCID {
		return nil, fmt.Errorf("CIDs %d and %d: must differ and be above %d", c.PrimaryCID, c.ChildCID, hostCID)
	}
	p := &Pair{flows: map[flow]struct{}{}}
	p.primary = &port{pair: p, id: c.PrimaryCID, known: hostCID, log: c.Log.With("guest", "primary")}
	p.child = &port{pair: p, id: c.ChildCID, known: c.ChildCID, log: c.Log.With("guest", "child")}
	p.primary.peer, p.child.peer = p.child, p.primary
	var err error
	if p.primary.socket, err = serveSocket(c.PrimarySocket, p.primary, p.primary.log); err != nil {
		return nil, err
	}
	if p.child.socket, err = serveSocket(c.ChildSocket, p.child, p.child.log); err != nil {
		p.primary.socket.close()
		return nil, err
	}
	return p, nil
}

// Close ends the switch; it waits for what the guests had sent.
func (p *Pair) Close() error {
	p.primary.socket.close()
	p.child.socket.close()
	return nil
}

// Flows is the number of connections between the guests.
func (p *Pair) Flows() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.flows)
}

func (p *port) cid() uint64 { return p.id }

func (p *port) up(d *device) {
	p.pair.mu.Lock()
	defer p.pair.mu.Unlock()
	p.dev = d
	p.log.Info("guest is up")
}

// down resets every connection on the surviving side: the dead guest will not.
func (p *port) down(*device) {
	p.pair.mu.Lock()
	p.dev = nil
	peer := p.peer.dev
	flows := p.pair.flows
	p.pair.flows = map[flow]struct{}{}
	p.pair.mu.Unlock()
	p.log.Info("guest is down", "connections", len(flows))
	if peer == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), DrainLimit)
	defer cancel()
	for f := range flows {
		h := header{srcCID: p.known, dstCID: p.peer.id, srcPort: f.childPort, dstPort: f.primaryPort, kind: typeStream, op: opReset}
		if p.peer == p.pair.child {
			h.srcPort, h.dstPort = f.primaryPort, f.childPort
		}
		if err := peer.send(ctx, h, nil); err != nil {
			return // it is down too, or takes nothing
		}
	}
}

// packet carries one packet to the other guest, or answers it with a reset.
func (p *port) packet(ctx context.Context, d *device, h header, payload []byte) {
	if h.srcCID != p.id {
		p.log.Error("packet dropped", "err", fmt.Errorf("its source is CID %d", h.srcCID))
		return
	}
	peer := p.route(h)
	if peer != nil {
		out := h
		out.srcCID, out.dstCID = p.known, p.peer.id
		err := peer.send(ctx, out, payload)
		if err == nil {
			return
		}
		if !errors.Is(err, errStopped) {
			return // this guest has stopped itself
		}
	}
	if h.op != opReset {
		d.answer(ctx, h.resetFor())
	}
}

// route follows the connections and returns the device that gets the packet; nil
// when nobody does.
func (p *port) route(h header) *device {
	if h.dstCID != p.peer.known || h.kind != typeStream {
		return nil
	}
	f := flow{h.srcPort, h.dstPort}
	if p == p.pair.child {
		f = flow{h.dstPort, h.srcPort}
	}
	p.pair.mu.Lock()
	defer p.pair.mu.Unlock()
	if p.peer.dev == nil {
		delete(p.pair.flows, f)
		return nil
	}
	_, known := p.pair.flows[f]
	switch {
	case h.op == opReset:
		delete(p.pair.flows, f)
	case h.op == opRequest && !known && len(p.pair.flows) < maxFlows:
		p.pair.flows[f] = struct{}{}
	case !known:
		return nil
	}
	if h.op == opReset && !known {
		return nil
	}
	return p.peer.dev
}
