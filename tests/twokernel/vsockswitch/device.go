package vsockswitch

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// DrainLimit bounds how long what a stopped guest has left in its ring may take
// to be delivered.
const DrainLimit = 5 * time.Second

// maxControl bounds the answers of the switch itself that wait for a guest's
// buffers; more hold up the one that causes them.
const maxControl = 1024

// backend is what a device belongs to.
type backend interface {
	cid() uint64
	// up says that the device runs. Packets follow.
	up(d *device)
	// packet is one packet from the guest. The payload is valid until it returns;
	// as long as it does not, the guest's ring stands. ctx ends DrainLimit after
	// the device was told to stop.
	packet(ctx context.Context, d *device, h header, payload []byte)
	// down says that the device has stopped and its ring is drained.
	down(d *device)
}

// device is a guest's vsock device while its rings run.
type device struct {
	back     backend
	log      *slog.Logger
	receive  *ring // we write, the guest receives
	transmit *ring
	offers   chan *offer
	control  chan header
	quit     chan struct{} // closed: stop was called
	deaf     chan struct{} // closed: the guest takes no more
	wg       sync.WaitGroup
	cancel   context.CancelFunc
}

// offer is a packet for the guest. taken gets the number of payload bytes that
// one receive buffer held.
type offer struct {
	h       header
	payload []byte
	taken   chan int
}

// startDevice runs both rings until stop.
func startDevice(back backend, receive, transmit *ring, log *slog.Logger) *device {
	ctx, cancel := context.WithCancel(context.Background())
	d := &device{
		back: back, log: log, receive: receive, transmit: transmit, cancel: cancel,
		offers: make(chan *offer), control: make(chan header, maxControl), quit: make(chan struct{}), deaf: make(chan struct{}),
	}
	back.up(d)
	d.wg.Add(2)
	go func() { defer d.wg.Done(); d.runReceive() }()
	go func() { defer d.wg.Done(); d.runTransmit(ctx) }()
	return d
}

// stop ends the device: first what goes to the guest, then, once drained, what
// comes from it. Nothing touches the rings when it returns.
func (d *device) stop() {
	close(d.quit)
	limit := time.AfterFunc(DrainLimit, d.cancel)
	d.receive.stop()
	d.transmit.stop()
	d.wg.Wait()
	limit.Stop()
	d.cancel()
	d.back.down(d)
}

// send delivers a packet to the guest, in as many pieces as its receive buffers
// make of it, and returns once the last is in its memory.
func (d *device) send(ctx context.Context, h header, payload []byte) error {
	for {
		o := &offer{h: h, payload: payload, taken: make(chan int, 1)}
		select {
		case <-d.deaf:
			return errStopped
		case <-ctx.Done():
			return ctx.Err()
		case d.offers <- o:
		}
		payload = payload[<-o.taken:]
		if len(payload) == 0 {
			return nil
		}
	}
}

// answer queues a packet without payload. It blocks while maxControl are queued.
func (d *device) answer(ctx context.Context, h header) {
	select {
	case d.control <- h:
	case <-d.deaf:
	case <-ctx.Done():
	}
}

// runReceive first takes a receive buffer and then a packet for it, so that a
// packet once taken is never held up.
func (d *device) runReceive() {
	defer close(d.deaf)
	for {
		c, ok, err := d.receive.pop()
		switch {
		case err != nil:
			d.log.Error("receive ring is broken", "err", err)
			return
		case !ok:
			if d.receive.wait() != nil {
				return
			}
			continue
		}
		var h header
		var payload []byte
		var taken chan int
		select {
		case <-d.quit:
			d.receive.giveBack()
			return
		case h = <-d.control:
		case o := <-d.offers:
			h, payload, taken = o.h, o.payload, o.taken
		}
		n, err := scatter(c.write, h, payload)
		if err != nil {
			d.log.Error("receive ring is broken", "err", err)
			if taken != nil {
				taken <- len(payload) // lost with the device
			}
			return
		}
		d.receive.push(c, headerBytes+n)
		if taken != nil {
			taken <- n
		}
	}
}

func (d *device) runTransmit(ctx context.Context) {
	scratch := make([]byte, maxPayload)
	for stopping := false; ; {
		c, ok, err := d.transmit.pop()
		switch {
		case err != nil:
			d.log.Error("transmit ring is broken", "err", err)
			return
		case !ok:
			if stopping {
				return
			}
			stopping = d.transmit.wait() != nil // then look once more
			continue
		}
		h, payload, err := gather(c.read, scratch)
		if err != nil {
			d.log.Error("packet dropped", "err", err)
		} else {
			d.back.packet(ctx, d, h, payload)
		}
		if ctx.Err() != nil {
			return
		}
		d.transmit.push(c, 0)
	}
}
