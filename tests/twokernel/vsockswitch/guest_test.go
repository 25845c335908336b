package vsockswitch

import (
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a test waits for what takes microseconds.
const patience = 30 * time.Second

// fakeGuest plays QEMU and the guest's kernel: it speaks vhost-user, owns the
// memory and both rings, and sends and receives packets.
//
// Its memory: descriptors, available and used ring of queue i at i*0x4000, then
// one buffer of bufferBytes per descriptor.
type fakeGuest struct {
	t       *testing.T
	conn    *net.UnixConn
	mem     []byte
	fd      int
	kick    [queues]int
	call    [queues]int
	next    [queues]uint16 // used entries seen
	posted  [queues]uint16 // chains made available
	entries int
}

const (
	ringArea    = 0x4000
	bufferArea  = 2 * ringArea
	bufferBytes = 4096
	guestBase   = 0x1000_0000
	userBase    = 0x7f00_0000_0000
)

// bootGuest connects to a switch and starts both queues with all receive buffers
// posted.
func bootGuest(t *testing.T, path string, entries int) *fakeGuest {
	t.Helper()
	g := connectGuest(t, path, entries)
	for i := range entries {
		g.postReceive(i)
	}
	g.setKick(0)
	g.setKick(1)
	return g
}

// connectGuest does everything up to the kick descriptors, which start the device.
func connectGuest(t *testing.T, path string, entries int) *fakeGuest {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	g := &fakeGuest{t: t, conn: conn, entries: entries}
	size := bufferArea + 2*entries*bufferBytes
	if g.fd, err = unix.MemfdCreate("guest", unix.MFD_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(g.fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	if g.mem, err = unix.Mmap(g.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.die()
		_ = unix.Munmap(g.mem)
		_ = unix.Close(g.fd)
	})
	if f := binary.LittleEndian.Uint64(g.ask(reqGetFeatures, nil)); f != featureVersion1|featureProtocol {
		t.Fatalf("features %#x", f)
	}
	g.tell(reqSetProtocolFeatures, u64s(protocolReplyAck|protocolConfig|protocolMQ))
	g.tell(reqSetMemTable, u64s(1, guestBase, uint64(size), userBase, 0), g.fd)
	for q := range queues {
		base := uint64(userBase + q*ringArea)
		g.tell(reqSetVringNum, u32s(uint32(q), uint32(entries)))
		g.tell(reqSetVringBase, u32s(uint32(q), 0))
		g.tell(reqSetVringAddr, append(u32s(uint32(q), 0), u64s(base, base+0x3000, base+0x2000, 0)...))
		if g.call[q], err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		if g.kick[q], err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		g.tell(reqSetVringCall, u64s(uint64(q)), g.call[q])
	}
	return g
}

func (g *fakeGuest) setKick(q int) { g.t.Helper(); g.tell(reqSetVringKick, u64s(uint64(q)), g.kick[q]) }

func u64s(v ...uint64) (b []byte) {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

func u32s(v ...uint32) (b []byte) {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, x)
	}
	return b
}

// tell sends a request that must be acknowledged.
func (g *fakeGuest) tell(request uint32, payload []byte, fds ...int) {
	g.t.Helper()
	if err := g.send(request, messageVersion|messageNeedReply, payload, fds); err != nil {
		g.t.Fatal(err)
	}
	if p := g.reply(request); binary.LittleEndian.Uint64(p) != 0 {
		g.t.Fatalf("request %d answered %x", request, p)
	}
}

// ask sends a request and returns its reply.
func (g *fakeGuest) ask(request uint32, payload []byte) []byte {
	g.t.Helper()
	if err := g.send(request, messageVersion, payload, nil); err != nil {
		g.t.Fatal(err)
	}
	return g.reply(request)
}

func (g *fakeGuest) send(request, flags uint32, payload []byte, fds []int) error {
	b := append(u32s(request, flags, uint32(len(payload))), payload...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := g.conn.WriteMsgUnix(b, oob, nil)
	return err
}

func (g *fakeGuest) reply(request uint32) []byte {
	g.t.Helper()
	_ = g.conn.SetReadDeadline(time.Now().Add(patience))
	var head [messageHeaderBytes]byte
	if _, err := io.ReadFull(g.conn, head[:]); err != nil {
		g.t.Fatalf("reply to request %d: %v", request, err)
	}
	if got := binary.LittleEndian.Uint32(head[:]); got != request {
		g.t.Fatalf("reply to request %d, want %d", got, request)
	}
	p := make([]byte, binary.LittleEndian.Uint32(head[8:]))
	if _, err := io.ReadFull(g.conn, p); err != nil {
		g.t.Fatal(err)
	}
	return p
}

// die is SIGKILL for QEMU: the connection ends, the memory stays as it is.
func (g *fakeGuest) die() {
	if g.conn == nil {
		return
	}
	g.conn.Close()
	g.conn = nil
	for q := range queues {
		_ = unix.Close(g.kick[q])
		_ = unix.Close(g.call[q])
	}
}

func (g *fakeGuest) buffer(q, i int) []byte {
	o := bufferArea + (q*g.entries+i)*bufferBytes
	return g.mem[o : o+bufferBytes]
}

// describe writes descriptor i of queue q.
func (g *fakeGuest) describe(q, i int, address uint64, size, flags, next int) {
	d := g.mem[q*ringArea+16*i:]
	copy(d, u64s(address))
	copy(d[8:], u32s(uint32(size), uint32(flags)|uint32(next)<<16))
}

// post makes the chain that begins at descriptor i available and kicks.
func (g *fakeGuest) post(q, i int) {
	avail := g.mem[q*ringArea+0x2000:]
	binary.LittleEndian.PutUint16(avail[4+2*(int(g.posted[q])%g.entries):], uint16(i))
	g.posted[q]++
	binary.LittleEndian.PutUint16(avail[2:], g.posted[q])
	_, _ = unix.Write(g.kick[q], u64s(1))
}

func (g *fakeGuest) bufferAddress(q, i int) uint64 {
	return uint64(guestBase + bufferArea + (q*g.entries+i)*bufferBytes)
}

func (g *fakeGuest) postReceive(i int) {
	g.describe(0, i, g.bufferAddress(0, i), bufferBytes, descWrite, 0)
	g.post(0, i)
}

// usedNext waits for queue q's next used entry.
func (g *fakeGuest) usedNext(q int) (id, n int) {
	g.t.Helper()
	used := g.mem[q*ringArea+0x3000:]
	for deadline := time.Now().Add(patience); binary.LittleEndian.Uint16(used[2:]) == g.next[q]; {
		left := time.Until(deadline)
		if left <= 0 {
			g.t.Fatalf("queue %d: nothing within %s", q, patience)
		}
		fds := []unix.PollFd{{Fd: int32(g.call[q]), Events: unix.POLLIN}}
		_, _ = unix.Poll(fds, int(left.Milliseconds())+1)
		var b [8]byte
		_, _ = unix.Read(g.call[q], b[:])
	}
	e := used[4+8*(int(g.next[q])%g.entries):]
	g.next[q]++
	return int(binary.LittleEndian.Uint32(e)), int(binary.LittleEndian.Uint32(e[4:]))
}

// transmit posts one packet of at most a buffer and does not wait.
func (g *fakeGuest) transmit(h header, payload []byte) {
	g.t.Helper()
	i := int(g.posted[1]) % (g.entries / 2) * 2
	b := g.buffer(1, i)
	h.length = uint32(len(payload))
	h.put(b)
	flags := 0
	if len(payload) > 0 {
		copy(g.buffer(1, i+1), payload)
		g.describe(1, i+1, g.bufferAddress(1, i+1), len(payload), 0, 0)
		flags = descNext
	}
	g.describe(1, i, g.bufferAddress(1, i), headerBytes, flags, i+1)
	g.post(1, i)
}

// sendPacket transmits and waits until the switch has taken it.
func (g *fakeGuest) sendPacket(h header, payload []byte) {
	g.t.Helper()
	g.transmit(h, payload)
	g.usedNext(1)
}

// receivePacket waits for a packet and posts its buffer again.
func (g *fakeGuest) receivePacket() (header, string) {
	g.t.Helper()
	i, n := g.usedNext(0)
	if n < headerBytes {
		g.t.Fatalf("packet of %d bytes", n)
	}
	b := g.buffer(0, i)
	h, data := parseHeader(b), string(b[headerBytes:n])
	if int(h.length) != len(data) {
		g.t.Fatalf("header announces %d bytes, the buffer has %d", h.length, len(data))
	}
	g.postReceive(i)
	return h, data
}

// expect receives a packet and compares what identifies it.
func (g *fakeGuest) expect(want header, data string) header {
	g.t.Helper()
	h, got := g.receivePacket()
	if h.op != want.op || h.srcCID != want.srcCID || h.dstCID != want.dstCID || h.srcPort != want.srcPort || h.dstPort != want.dstPort || h.kind != typeStream {
		g.t.Fatalf("got %+v, want %+v", h, want)
	}
	if got != data {
		g.t.Fatalf("got %d bytes %.40q, want %d bytes %.40q", len(got), got, len(data), data)
	}
	return h
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// eventually polls a condition.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}
