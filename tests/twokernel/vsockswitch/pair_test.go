package vsockswitch

import (
	"bytes"
	"testing"
)

const primaryCID, childCID = 3, 42

// newTestPair starts a switch; the paths are the guests' sockets.
func newTestPair(t *testing.T) (p *Pair, primary, child string) {
	t.Helper()
	dir := t.TempDir()
	primary, child = dir+"/p", dir+"/c"
	p, err := NewPair(PairConfig{PrimarySocket: primary, ChildSocket: child, PrimaryCID: primaryCID, ChildCID: childCID, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p, primary, child
}

// up waits until both guests run.
func (p *Pair) waitUp(t *testing.T, both bool) {
	t.Helper()
	eventually(t, "guests up", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.primary.dev != nil && (p.child.dev != nil) == both
	})
}

// fromPrimary and fromChild are packets as their guests write them; atChild and
// atPrimary the same as the other guest sees them.
func fromPrimary(op uint16) header {
	return header{srcCID: primaryCID, dstCID: childCID, srcPort: 5000, dstPort: 1023, kind: typeStream, op: op, bufAlloc: 1 << 20, fwdCnt: 77}
}

func atChild(op uint16) header {
	return header{srcCID: hostCID, dstCID: childCID, srcPort: 5000, dstPort: 1023, op: op}
}

func fromChild(op uint16) header {
	return header{srcCID: childCID, dstCID: hostCID, srcPort: 1023, dstPort: 5000, kind: typeStream, op: op, bufAlloc: 1 << 18, fwdCnt: 9}
}

func atPrimary(op uint16) header {
	return header{srcCID: childCID, dstCID: primaryCID, srcPort: 1023, dstPort: 5000, op: op}
}

// connect opens the connection between ports 5000 and 1023.
func connect(t *testing.T, p, c *fakeGuest) {
	t.Helper()
	p.sendPacket(fromPrimary(opRequest), nil)
	h := c.expect(atChild(opRequest), "")
	if h.bufAlloc != 1<<20 || h.fwdCnt != 77 {
		t.Fatalf("credit of the primary arrives as %d, %d", h.bufAlloc, h.fwdCnt)
	}
	c.sendPacket(fromChild(opResponse), nil)
	h = p.expect(atPrimary(opResponse), "")
	if h.bufAlloc != 1<<18 || h.fwdCnt != 9 {
		t.Fatalf("credit of the child arrives as %d, %d", h.bufAlloc, h.fwdCnt)
	}
}

func TestPairCarriesBothWays(t *testing.T) {
	sw, pp, cp := newTestPair(t)
	p, c := bootGuest(t, pp, 64), bootGuest(t, cp, 64)
	sw.waitUp(t, true)
	connect(t, p, c)
	p.sendPacket(fromPrimary(opData), []byte("to the child"))
	c.expect(atChild(opData), "to the child")
	c.sendPacket(fromChild(opData), []byte("to the primary"))
	p.expect(atPrimary(opData), "to the primary")
	if n := sw.Flows(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
	p.sendPacket(fromPrimary(opReset), nil)
	c.expect(atChild(opReset), "")
	if n := sw.Flows(); n != 0 {
		t.Errorf("%d connections after the reset, want 0", n)
	}
}

func TestPairGivesTheCID(t *testing.T) {
	_, pp, _ := newTestPair(t)
	g := connectGuest(t, pp, 8)
	got := g.ask(reqGetConfig, append(u32s(0, 8, 0), make([]byte, 8)...))
	if want := append(u32s(0, 8, 0), u64s(primaryCID)...); !bytes.Equal(got, want) {
		t.Errorf("configuration %x, want %x", got, want)
	}
	if got := g.ask(reqGetConfig, append(u32s(4, 8, 0), make([]byte, 8)...)); len(got) != 0 {
		t.Errorf("configuration behind its end: %x", got)
	}
}

func TestPairSplitsLargePackets(t *testing.T) {
	sw, pp, cp := newTestPair(t)
	p, c := bootGuest(t, pp, 64), bootGuest(t, cp, 64)
	sw.waitUp(t, true)
	connect(t, p, c)
	want := bytes.Repeat([]byte("0123456789abcdef"), 60000/16)
	// One chain of a header and 15 buffers that lie apart.
	h := fromPrimary(opData)
	h.length = uint32(len(want))
	h.put(p.buffer(1, 40))
	p.describe(1, 40, p.bufferAddress(1, 40), headerBytes, descNext, 0)
	for i, rest := 0, want; len(rest) > 0; i++ {
		n := copy(p.buffer(1, 2*i), rest)
		rest = rest[n:]
		flags := descNext
		if len(rest) == 0 {
			flags = 0
		}
		p.describe(1, i, p.bufferAddress(1, 2*i), n, flags, i+1)
	}
	p.post(1, 40)
	var got []byte
	for len(got) < len(want) {
		h, data := c.receivePacket()
		if h.op != opData || h.fwdCnt != 77 || len(data) > bufferBytes-headerBytes {
			t.Fatalf("piece %+v of %d bytes", h, len(data))
		}
		got = append(got, data...)
	}
	if !bytes.Equal(got, want) {
		t.Error("the payload differs")
	}
}

func TestPairRefuses(t *testing.T) {
	for _, tt := range []struct {
		name    string
		childUp bool
		change  func(*header)
		silent  bool // nothing comes back
	}{
		{name: "child down", change: func(*header) {}},
		{name: "unknown CID", childUp: true, change: func(h *header) { h.dstCID = 43 }},
		{name: "the host", childUp: true, change: func(h *header) { h.dstCID = hostCID }},
		{name: "no stream", childUp: true, change: func(h *header) { h.kind = 2 }},
		{name: "data without a connection", childUp: true, change: func(h *header) { h.op = opData }},
		{name: "reset without a connection", childUp: true, change: func(h *header) { h.op = opReset }, silent: true},
		{name: "false source", childUp: true, change: func(h *header) { h.srcCID = childCID }, silent: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sw, pp, cp := newTestPair(t)
			p := bootGuest(t, pp, 16)
			if tt.childUp {
				bootGuest(t, cp, 16)
			}
			sw.waitUp(t, tt.childUp)
			h := fromPrimary(opRequest)
			tt.change(&h)
			p.sendPacket(h, nil)
			if tt.silent {
				// What comes next must be the answer to this one.
				h = fromPrimary(opRequest)
				h.dstCID, h.dstPort = 99, 4711
				p.sendPacket(h, nil)
			}
			got, _ := p.receivePacket()
			want := h.resetFor()
			if got.op != opReset || got.srcCID != want.srcCID || got.dstCID != primaryCID || got.srcPort != want.srcPort || got.dstPort != want.dstPort || got.kind != h.kind {
				t.Errorf("answer %+v, want %+v", got, want)
			}
			if n := sw.Flows(); n != 0 {
				t.Errorf("%d connections, want 0", n)
			}
		})
	}
}

func TestPairResetsTheSurvivor(t *testing.T) {
	sw, pp, cp := newTestPair(t)
	p, c := bootGuest(t, pp, 16), bootGuest(t, cp, 16)
	sw.waitUp(t, true)
	connect(t, p, c)
	c.die()
	p.expect(atPrimary(opReset), "")
	sw.waitUp(t, false)
	// The next child is another one: packets of the old connection do not reach it.
	c = bootGuest(t, cp, 16)
	sw.waitUp(t, true)
	p.sendPacket(fromPrimary(opData), []byte("old"))
	p.expect(atPrimary(opReset), "")
	connect(t, p, c)
	p.die()
	c.expect(atChild(opReset), "")
}

func TestPairDeliversWhatADeadGuestLeft(t *testing.T) {
	sw, pp, cp := newTestPair(t)
	p := connectGuest(t, pp, 16) // receive buffers are posted one at a time
	p.setKick(0)
	p.setKick(1)
	c := bootGuest(t, cp, 16)
	sw.waitUp(t, true)
	p.sendPacket(fromPrimary(opRequest), nil)
	c.expect(atChild(opRequest), "")
	for i := range 8 {
		c.transmit(fromChild(opData), []byte{byte('0' + i)})
	}
	c.die()
	p.postReceive(0)
	for i := range 8 {
		p.expect(atPrimary(opData), string(byte('0'+i))) // posts the buffer again
	}
	p.expect(atPrimary(opReset), "")
}

func TestPairBoundsConnections(t *testing.T) {
	sw, pp, cp := newTestPair(t)
	p, c := bootGuest(t, pp, 64), bootGuest(t, cp, 64)
	sw.waitUp(t, true)
	h := fromPrimary(opRequest)
	for i := range maxFlows {
		h.srcPort = uint32(10000 + i)
		p.sendPacket(h, nil)
		c.receivePacket()
	}
	h.srcPort = 9999
	p.sendPacket(h, nil)
	want := h.resetFor()
	p.expect(want, "")
	if n := sw.Flows(); n != maxFlows {
		t.Errorf("%d connections, want %d", n, maxFlows)
	}
}

// TestBrokenRings shows that a guest with a broken ring loses its device and no
// other guest is harmed.
func TestBrokenRings(t *testing.T) {
	for _, tt := range []struct {
		name  string
		write func(*fakeGuest)
	}{
		{"address outside memory", func(g *fakeGuest) { g.describe(1, 0, 0xdead_0000_0000, 44, 0, 0); g.post(1, 0) }},
		{"address that wraps", func(g *fakeGuest) { g.describe(1, 0, guestBase+64, 0xffffffff, 0, 0); g.post(1, 0) }},
		{"chain in a circle", func(g *fakeGuest) {
			g.describe(1, 0, g.bufferAddress(1, 0), 44, descNext, 0)
			g.post(1, 0)
		}},
		{"head outside the queue", func(g *fakeGuest) { g.post(1, 4711) }},
		{"index too far ahead", func(g *fakeGuest) { g.posted[1] = 1000; g.post(1, 0) }},
		{"indirect", func(g *fakeGuest) { g.describe(1, 0, g.bufferAddress(1, 0), 64, descIndirect, 0); g.post(1, 0) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sw, pp, cp := newTestPair(t)
			p, c := bootGuest(t, pp, 16), bootGuest(t, cp, 16)
			sw.waitUp(t, true)
			connect(t, p, c)
			tt.write(c)
			c.die()
			p.expect(atPrimary(opReset), "")
			c = bootGuest(t, cp, 16)
			sw.waitUp(t, true)
			connect(t, p, c)
		})
	}
}

// TestShortPackets shows that a packet that is none is dropped and the next one
// is carried.
func TestShortPackets(t *testing.T) {
	sw, pp, cp := newTestPair(t)
	p, c := bootGuest(t, pp, 16), bootGuest(t, cp, 16)
	sw.waitUp(t, true)
	connect(t, p, c)
	for _, size := range []int{0, 1, headerBytes - 1, headerBytes} {
		h := fromPrimary(opData)
		h.length = 100
		h.put(p.buffer(1, 0))
		p.describe(1, 0, p.bufferAddress(1, 0), size, 0, 0)
		p.post(1, 0)
		p.usedNext(1)
	}
	h := fromPrimary(opData)
	h.length = maxPayload + 1
	h.put(p.buffer(1, 0))
	p.describe(1, 0, p.bufferAddress(1, 0), bufferBytes, 0, 0)
	p.post(1, 0)
	p.usedNext(1)
	p.sendPacket(fromPrimary(opData), []byte("good"))
	c.expect(atChild(opData), "good")
}
