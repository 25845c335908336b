package vsockswitch

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// newTestHybrid starts a switch with a running guest.
func newTestHybrid(t *testing.T) (h *Hybrid, g *fakeGuest, path string) {
	t.Helper()
	dir := t.TempDir()
	path = dir + "/v.sock"
	h, err := NewHybrid(HybridConfig{GuestSocket: dir + "/g", Socket: path, CID: childCID, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	g = bootGuest(t, dir+"/g", 64)
	eventually(t, "guest up", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.dev != nil
	})
	return h, g, path
}

func dialUnix(t *testing.T, path string) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// hostConnect opens a link to port 1023 and returns the program's end and a
// header that the guest answers with.
func hostConnect(t *testing.T, g *fakeGuest, path string) (*net.UnixConn, header) {
	t.Helper()
	c := dialUnix(t, path)
	fmt.Fprint(c, "CONNECT 1023\n")
	h, _ := g.receivePacket()
	if h.op != opRequest || h.srcCID != hostCID || h.dstCID != childCID || h.dstPort != 1023 || h.bufAlloc != windowBytes {
		t.Fatalf("request %+v", h)
	}
	back := h.resetFor()
	back.op, back.bufAlloc, back.fwdCnt = opResponse, 1000, 0
	g.sendPacket(back, nil)
	want := fmt.Sprintf("OK %d\n", h.srcPort)
	if got := readN(t, c, len(want)); got != want {
		t.Fatalf("answer %q, want %q", got, want)
	}
	return c, back
}

func readN(t *testing.T, r io.Reader, n int) string {
	t.Helper()
	b := make([]byte, n)
	if k, err := io.ReadFull(r, b); err != nil {
		t.Fatalf("read %d of %d bytes: %v", k, n, err)
	}
	return string(b)
}

func TestHybridCarriesWithinTheGuestsWindow(t *testing.T) {
	_, g, path := newTestHybrid(t)
	c, h := hostConnect(t, g, path)
	h.op = opData
	g.sendPacket(h, []byte("from the guest"))
	if got := readN(t, c, 14); got != "from the guest" {
		t.Fatalf("the program reads %q", got)
	}
	want := bytes.Repeat([]byte("x"), 2500)
	if _, err := c.Write(want); err != nil {
		t.Fatal(err)
	}
	got := 0
	for got < len(want) {
		p, data := g.receivePacket()
		if p.op != opData || p.fwdCnt != 14 {
			t.Fatalf("packet %+v", p)
		}
		got += len(data)
		if got > int(h.fwdCnt+h.bufAlloc) {
			t.Fatalf("%d bytes with a window up to %d", got, h.fwdCnt+h.bufAlloc)
		}
		if got == int(h.fwdCnt+h.bufAlloc) {
			h.op, h.fwdCnt = opCreditUpdate, uint32(got)
			g.sendPacket(h, nil)
		}
	}
	// The program closes: the guest hears that nothing more comes, closes too and
	// gets its reset.
	c.Close()
	if p, _ := g.receivePacket(); p.op != opShutdown || p.flags != shutdownSend {
		t.Fatalf("packet %+v, want a shutdown", p)
	}
	h.op, h.flags = opShutdown, shutdownBoth
	g.sendPacket(h, nil)
	if p, _ := g.receivePacket(); p.op != opReset {
		t.Fatalf("packet %+v, want a reset", p)
	}
}

func TestHybridTellsCredit(t *testing.T) {
	_, g, path := newTestHybrid(t)
	c, h := hostConnect(t, g, path)
	h.op = opData
	block := bytes.Repeat([]byte("y"), bufferBytes)
	for sent := 0; sent <= windowBytes/4; sent += len(block) {
		g.sendPacket(h, block)
		readN(t, c, len(block))
	}
	p, _ := g.receivePacket()
	if p.op != opCreditUpdate || p.fwdCnt < windowBytes/4 {
		t.Fatalf("packet %+v, want a credit update", p)
	}
	h.op = opCreditRequest
	g.sendPacket(h, nil)
	if p, _ := g.receivePacket(); p.op != opCreditUpdate {
		t.Fatalf("packet %+v, want a credit update", p)
	}
}

func TestHybridResetsAGuestBeyondItsWindow(t *testing.T) {
	_, g, path := newTestHybrid(t)
	c, h := hostConnect(t, g, path)
	_ = c.SetReadBuffer(1)
	h.op = opData
	block := bytes.Repeat([]byte("z"), bufferBytes)
	// The socket's own buffers take some; then the window is full.
	for range 1000 {
		g.sendPacket(h, block)
		for usedIndex(g) != g.next[0] {
			p, _ := g.receivePacket()
			if p.op == opReset {
				return
			}
			if p.op != opCreditUpdate {
				t.Fatalf("packet %+v, want a reset", p)
			}
		}
	}
	t.Fatal("4 MB beyond the window, and no reset")
}

// usedIndex is how many packets the guest has been given.
func usedIndex(g *fakeGuest) uint16 {
	b := g.mem[0x3002:]
	return uint16(b[0]) | uint16(b[1])<<8
}

func TestHybridRefuses(t *testing.T) {
	_, g, path := newTestHybrid(t)
	t.Run("no listener in the guest", func(t *testing.T) {
		c := dialUnix(t, path)
		fmt.Fprint(c, "CONNECT 7\n")
		h, _ := g.receivePacket()
		g.sendPacket(h.resetFor(), nil)
		if b, err := io.ReadAll(c); len(b) > 0 || err != nil {
			t.Errorf("got %q, %v, want the end", b, err)
		}
		g.receivePacket() // the link's own reset
	})
	for _, line := range []string{"CONNECT x\n", "GET / HTTP/1.1\r\n", "CONNECT 4294967296\n", "CONNECT 1111111111111111111111111111111111111111\n"} {
		t.Run(line, func(t *testing.T) {
			c := dialUnix(t, path)
			fmt.Fprint(c, line)
			if b, _ := io.ReadAll(c); len(b) > 0 {
				t.Errorf("got %q, want the end", b)
			}
		})
	}
	t.Run("no program on the host", func(t *testing.T) {
		h := fromChild(opRequest)
		h.dstPort = 9
		g.sendPacket(h, nil)
		g.expect(h.resetFor(), "")
	})
}

func TestHybridGuestDials(t *testing.T) {
	_, g, path := newTestHybrid(t)
	l, err := net.Listen("unix", path+"_5000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	g.sendPacket(fromChild(opRequest), nil)
	g.expect(header{srcCID: hostCID, dstCID: childCID, srcPort: 5000, dstPort: 1023, op: opResponse}, "")
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	g.sendPacket(fromChild(opData), []byte("hello"))
	if got := readN(t, c, 5); got != "hello" {
		t.Errorf("got %q", got)
	}
}

// TestHybridWritesWhatADeadGuestLeft shows that nothing is cut when the guest
// dies while the program reads slowly.
func TestHybridWritesWhatADeadGuestLeft(t *testing.T) {
	h, g, path := newTestHybrid(t)
	c, p := hostConnect(t, g, path)
	_ = c.SetReadBuffer(1)
	p.op = opData
	var want []byte
	for i := 0; len(want)+bufferBytes <= windowBytes; i++ {
		block := bytes.Repeat([]byte{byte(i)}, bufferBytes)
		want = append(want, block...)
		g.sendPacket(p, block)
	}
	g.die()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the program read %d bytes, %v; want %d", len(got), err, len(want))
	}
	eventually(t, "no link left", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.links) == 0
	})
}
