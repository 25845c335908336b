package vsockswitch

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// maxHybrid bounds a guest's connections; each may hold windowBytes.
	maxHybrid = 64
	// connectLimit bounds a program's CONNECT line and the guest's answer to it.
	connectLimit = 5 * time.Second
	// firstHostPort is where the host's own ports begin, as in Firecracker.
	firstHostPort = 1 << 30
)

// HybridConfig says where the guest's QEMU and the host's programs connect.
type HybridConfig struct {
	GuestSocket string // vhost-user, made anew
	Socket      string // hybrid vsock, made anew
	CID         uint64 // the guest's
	Log         *slog.Logger
}

// Hybrid is a running switch between one guest and Unix sockets.
type Hybrid struct {
	id       uint64
	path     string
	log      *slog.Logger
	socket   *socket
	listener *net.UnixListener
	wg       sync.WaitGroup

	mu     sync.Mutex
	dev    *device // nil while the guest is down
	links  map[linkKey]*link
	next   uint32 // host port
	closed bool
}

// linkKey names a connection by its two ports.
type linkKey struct{ guest, host uint32 }

// NewHybrid starts a switch. The guest may come and go.
func NewHybrid(c HybridConfig) (*Hybrid, error) {
	if c.CID <= hostCID {
		return nil, fmt.Errorf("CID %d: must be above %d", c.CID, hostCID)
	}
	h := &Hybrid{id: c.CID, path: c.Socket, log: c.Log, links: map[linkKey]*link{}, next: firstHostPort}
	var err error
	if h.listener, err = listenUnix(c.Socket); err != nil {
		return nil, err
	}
	if h.socket, err = serveSocket(c.GuestSocket, h, c.Log); err != nil {
		h.listener.Close()
		return nil, err
	}
	h.wg.Add(1)
	go func() { defer h.wg.Done(); h.accept() }()
	return h, nil
}

// Close ends the switch; it waits for what the guest had sent.
func (h *Hybrid) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.listener.Close()
	h.socket.close() // ends every link
	h.wg.Wait()
	return nil
}

func (h *Hybrid) cid() uint64 { return h.id }

func (h *Hybrid) up(d *device) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dev = d
	h.log.Info("guest is up")
}

// down ends every link once what the guest sent is written, or DrainLimit is over.
func (h *Hybrid) down(*device) {
	h.mu.Lock()
	h.dev = nil
	var links []*link
	for _, l := range h.links {
		links = append(links, l)
	}
	h.mu.Unlock()
	h.log.Info("guest is down", "connections", len(links))
	for _, l := range links {
		l.finish()
	}
	for _, l := range links {
		<-l.done
	}
}

// accept serves the host's programs.
func (h *Hybrid) accept() {
	for {
		conn, err := h.listener.AcceptUnix()
		if err != nil {
			return
		}
		h.wg.Add(1)
		go func() {
			defer h.wg.Done()
			if err := h.connect(conn); err != nil {
				h.log.Info("connection refused", "err", err)
				conn.Close()
			}
		}()
	}
}

// connect asks the guest for the port that a program names. It takes conn over
// when it succeeds.
func (h *Hybrid) connect(conn *net.UnixConn) error {
	if err := conn.SetReadDeadline(time.Now().Add(connectLimit)); err != nil {
		return err
	}
	port, err := readConnect(conn)
	if err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	l, err := h.add(conn, func() linkKey { h.next++; return linkKey{port, h.next} })
	if err != nil {
		return err
	}
	l.dev.answer(context.Background(), l.header(opRequest))
	select {
	case ok := <-l.accepted:
		if ok {
			_, err = fmt.Fprintf(conn, "OK %d\n", l.key.host)
		} else {
			err = fmt.Errorf("the guest refuses port %d", port)
		}
	case <-time.After(connectLimit):
		err = fmt.Errorf("the guest does not answer on port %d", port)
	}
	if err != nil {
		l.dev.answer(context.Background(), l.header(opReset))
		h.remove(l)
		close(l.done)
		return err
	}
	h.wg.Add(1)
	go func() { defer h.wg.Done(); l.run() }()
	return nil
}

// readConnect reads "CONNECT port\n" and not a byte more.
func readConnect(r io.Reader) (uint32, error) {
	one := bufio.NewReaderSize(io.LimitReader(oneByte{r}, 32), 16)
	line, err := one.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("no CONNECT line but %q: %w", line, err)
	}
	text, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "CONNECT ")
	port, err := strconv.ParseUint(text, 10, 32)
	if !ok || err != nil {
		return 0, fmt.Errorf("no CONNECT line but %q", line)
	}
	return uint32(port), nil
}

// oneByte keeps a buffered reader from reading ahead.
type oneByte struct{ io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.Reader.Read(p[:1]) }

// fromGuest answers a guest that dials the host: with the socket of that port.
func (h *Hybrid) fromGuest(ctx context.Context, d *device, first header) {
	refuse := func(err error) {
		h.log.Info("connection of the guest refused", "err", err)
		d.answer(ctx, first.resetFor())
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: fmt.Sprintf("%s_%d", h.path, first.dstPort), Net: "unix"})
	if err != nil {
		refuse(err)
		return
	}
	l, err := h.add(conn, func() linkKey { return linkKey{first.srcPort, first.dstPort} })
	if err != nil {
		conn.Close()
		refuse(err)
		return
	}
	l.credit(first)
	d.answer(ctx, l.header(opResponse))
	h.wg.Add(1)
	go func() { defer h.wg.Done(); l.run() }()
}

// add makes a link; it owns conn once run.
func (h *Hybrid) add(conn *net.UnixConn, key func() linkKey) (*link, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.dev == nil || h.closed:
		return nil, errStopped
	case len(h.links) >= maxHybrid:
		return nil, fmt.Errorf("the guest has %d connections, the limit", maxHybrid)
	}
	l := newLink(h, h.dev, conn, key())
	if h.links[l.key] != nil {
		return nil, fmt.Errorf("ports %d and %d are in use", l.key.guest, l.key.host)
	}
	h.links[l.key] = l
	return l, nil
}

func (h *Hybrid) remove(l *link) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.links[l.key] == l {
		delete(h.links, l.key)
	}
}

// packet is one packet of the guest's.
func (h *Hybrid) packet(ctx context.Context, d *device, p header, payload []byte) {
	h.mu.Lock()
	l := h.links[linkKey{p.srcPort, p.dstPort}]
	h.mu.Unlock()
	valid := p.srcCID == h.id && p.dstCID == hostCID && p.kind == typeStream
	switch {
	case valid && l != nil:
		l.packet(ctx, p, payload)
	case valid && p.op == opRequest:
		h.fromGuest(ctx, d, p)
	case p.op != opReset:
		d.answer(ctx, p.resetFor())
	}
}

// Links is the number of connections between the guest and Unix sockets.
func (h *Hybrid) Links() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.links)
}
