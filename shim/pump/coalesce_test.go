package pump

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	wire "mknet/spec/pump"
	"mknet/tests/netlab"
)

// gift is a packet as a TUN with a virtio-net header gives it: a datagram whose
// checksum is left to be finished, with the fields that change sets.
func gift(payload []byte, change func(p []byte)) []byte {
	p := uncut.Append(nil)
	p = append(p, 0x45, 0)
	p = binary.BigEndian.AppendUint16(p, uint16(28+len(payload)))
	p = append(p, 0, 0, 0x40, 0, 64, 17, 0, 0, 172, 30, 0, 2, 172, 30, 0, 1)
	p = binary.BigEndian.AppendUint16(p, 4000)
	p = binary.BigEndian.AppendUint16(p, 53)
	p = binary.BigEndian.AppendUint16(p, uint16(8+len(payload)))
	p = append(p, 0, 0)
	p = append(p, payload...)
	finish(p)
	if change != nil {
		change(p)
	}
	return p
}

// finish writes the checksum of the IPv4 header and the partial one over UDP.
func finish(p []byte) {
	binary.BigEndian.PutUint16(p[atIPSum:], 0)
	binary.BigEndian.PutUint16(p[atIPSum:], ^folded(p[atIP:atUDP]))
	pseudo := append(slices.Clone(p[atSource:atUDP]), 0, 17, p[atUDPTotal], p[atUDPTotal+1])
	binary.BigEndian.PutUint16(p[atUDPSum:], folded(pseudo))
}

// folded is the sum that RFC 1071 complements.
func folded(b []byte) uint16 {
	var s uint32
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s > 0xFFFF {
		s = s&0xFFFF + s>>16
	}
	return uint16(s)
}

// batchOf is what a sender makes of packets that it reads one after the other.
func batchOf(uso bool, packets [][]byte) *batch {
	b := &batch{buf: make([]byte, wire.HeaderBytes+wire.MaxBatchBytes), packet: wire.DataVnet, vnetBytes: wire.VnetHeaderBytes, end: wire.HeaderBytes}
	b.udp.on = uso
	for _, p := range packets {
		at := b.end + wire.HeaderBytes
		b.add(at, copy(b.buf[at:], p))
	}
	return b
}

// bodies takes the frames of a batch apart.
func bodies(t *testing.T, b *batch) (all [][]byte) {
	t.Helper()
	for rest := b.buf[wire.HeaderBytes:b.end]; len(rest) > 0; {
		f, err := wire.Next(rest, false)
		if err != nil || f.Bytes == 0 || f.Type != wire.DataVnet {
			t.Fatalf("frame %d is %+v, %v", len(all), f, err)
		}
		all = append(all, f.Body)
		rest = rest[f.Bytes:]
	}
	return all
}

// cut is what the peer's kernel makes of a frame: the datagrams it was made of.
func cut(p []byte) [][]byte {
	h := wire.ParseVnet(p)
	if h.GSOType != wire.GSOUDPL4 || h.GSOSize == 0 {
		return [][]byte{p}
	}
	var all [][]byte
	for rest := p[atPayload:]; len(rest) > 0; {
		n := min(int(h.GSOSize), len(rest))
		d := append(uncut.Append(nil), p[atIP:atPayload]...)
		d = append(d, rest[:n]...)
		binary.BigEndian.PutUint16(d[atTotal:], uint16(28+n))
		binary.BigEndian.PutUint16(d[atUDPTotal:], uint16(8+n))
		finish(d)
		all, rest = append(all, d), rest[n:]
	}
	return all
}

func payload(n int, b byte) []byte { return bytes.Repeat([]byte{b}, n) }

func TestCoalesce(t *testing.T) {
	set := func(at int, v byte) func([]byte) { return func(p []byte) { p[at] = v } }
	tcp := func(p []byte) { p[atIP+9] = 6 }
	same := gift(payload(64, 1), nil)
	many := func(n, size int) (all [][]byte) {
		for i := range n {
			all = append(all, gift(payload(size, byte(i)), nil))
		}
		return all
	}
	for name, c := range map[string]struct {
		packets [][]byte
		frames  []int // datagrams in each
	}{
		"one":                      {many(1, 64), []int{1}},
		"a flow":                   {many(5, 64), []int{5}},
		"no more than a kernel":    {many(maxCoalesced+1, 64), []int{maxCoalesced, 1}},
		"no more than a packet":    {many(50, 1372), []int{47, 3}},
		"the last may be shorter":  {[][]byte{same, same, gift(payload(3, 2), nil), same}, []int{3, 1}},
		"a longer one does not":    {[][]byte{same, gift(payload(65, 2), nil), gift(payload(65, 3), nil)}, []int{1, 2}},
		"too small for a peer":     {many(3, wire.MinGSOBytes-1), []int{1, 1, 1}},
		"empty":                    {[][]byte{same, gift(nil, nil), same}, []int{1, 1, 1}},
		"another between":          {[][]byte{same, gift(payload(64, 2), set(atUDP+1, 9)), same}, []int{1, 1, 1}},
		"other ports":              {[][]byte{same, gift(payload(64, 2), set(atUDP+3, 9))}, []int{1, 1}},
		"other addresses":          {[][]byte{same, gift(payload(64, 2), set(atSource+7, 9))}, []int{1, 1}},
		"another class":            {[][]byte{same, gift(payload(64, 2), set(atTOS, 8))}, []int{1, 1}},
		"another TTL":              {[][]byte{same, gift(payload(64, 2), set(atTTL, 1))}, []int{1, 1}},
		"may be fragmented":        {[][]byte{same, gift(payload(64, 2), set(atFragment, 0))}, []int{1, 1}},
		"a fragment":               {[][]byte{same, gift(payload(64, 2), set(atFragment, 0x60))}, []int{1, 1}},
		"options":                  {[][]byte{same, gift(payload(64, 2), set(atIP, 0x46))}, []int{1, 1}},
		"TCP":                      {[][]byte{gift(payload(64, 2), tcp), gift(payload(64, 2), tcp)}, []int{1, 1}},
		"a finished checksum":      {[][]byte{same, gift(payload(64, 2), set(0, 0))}, []int{1, 1}},
		"an unknown flag":          {[][]byte{same, gift(payload(64, 2), set(0, 9))}, []int{1, 1}},
		"a checksum elsewhere":     {[][]byte{same, gift(payload(64, 2), set(6, 21))}, []int{1, 1}},
		"already many (USO)":       {[][]byte{same, gift(payload(640, 2), set(1, wire.GSOUDPL4)), same}, []int{1, 1, 1}},
		"UDP says another length":  {[][]byte{same, gift(payload(64, 2), set(atUDPTotal+1, 60))}, []int{1, 1}},
		"IPv4 says another length": {[][]byte{same, gift(payload(64, 2), set(atTotal+1, 80))}, []int{1, 1}},
		"no packet":                {[][]byte{same, same[:wire.VnetHeaderBytes+1], same}, []int{1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			b := batchOf(true, c.packets)
			all := bodies(t, b)
			if len(all) != len(c.frames) || b.frames != len(c.frames) || b.packets != len(c.packets) {
				t.Fatalf("%d frames, counted as %d of %d packets, want %d of %d", len(all), b.frames, b.packets, len(c.frames), len(c.packets))
			}
			check := wire.Check{MTUBytes: 1400}
			ipBytes, next := 0, 0
			for i, p := range all {
				ipBytes += len(p) - wire.VnetHeaderBytes
				datagrams := cut(p)
				if len(datagrams) != c.frames[i] {
					t.Fatalf("frame %d has %d datagrams, want %d", i, len(datagrams), c.frames[i])
				}
				if d := check.Vnet(p); c.frames[i] > 1 && d != wire.DropNone {
					t.Errorf("frame %d: the peer drops it as %s", i, d)
				}
				if c.frames[i] > 1 && (binary.BigEndian.Uint16(p[atIPSum:]) != ^folded(zeroed(p[atIP:atUDP], 10))) {
					t.Errorf("frame %d: checksum %04x of the IPv4 header", i, p[atIPSum:atIPSum+2])
				}
				for _, d := range datagrams {
					if !bytes.Equal(d, c.packets[next]) {
						t.Fatalf("datagram %d is\n%x, want\n%x", next, d, c.packets[next])
					}
					next++
				}
			}
			if b.ipBytes != ipBytes {
				t.Errorf("%d bytes counted, want %d", b.ipBytes, ipBytes)
			}
		})
	}
	if b := batchOf(false, many(2, 64)); b.frames != 2 {
		t.Errorf("%d frames without USO, want 2", b.frames)
	}
}

// zeroed is b with the 16-bit field at an offset set to 0.
func zeroed(b []byte, at int) []byte {
	b = slices.Clone(b)
	b[at], b[at+1] = 0, 0
	return b
}

// FuzzCoalesce: whatever a TUN gives, the peer's kernel cuts out of the frames again.
// Each byte pair is a datagram: how it differs from others, and its size.
func FuzzCoalesce(f *testing.F) {
	f.Add([]byte{0, 64, 0, 64, 0, 3, 0, 64, 1, 64, 2, 64})
	f.Add(bytes.Repeat([]byte{0, 200}, 200))
	f.Add(bytes.Repeat([]byte{0, 49, 6, 49}, 40))
	f.Fuzz(func(t *testing.T, choices []byte) {
		var packets [][]byte
		for i := 0; i+1 < len(choices) && len(packets) < 120; i += 2 {
			field := int(choices[i]) % (2 * atPayload) // half of them change nothing
			packets = append(packets, gift(payload(5*int(choices[i+1]), choices[i]), func(p []byte) {
				if field < min(atPayload, len(p)) {
					p[field] ^= choices[i+1]
				}
			}))
		}
		b, check := batchOf(true, packets), wire.Check{MTUBytes: 1400}
		next := 0
		for _, p := range bodies(t, b) {
			whole := next < len(packets) && bytes.Equal(p, packets[next])
			if whole { // as it came, whatever it is
				next++
				continue
			}
			if d := check.Vnet(p); d != wire.DropNone {
				t.Fatalf("a joined frame is dropped as %s: %x", d, p[:atPayload])
			}
			for _, d := range cut(p) {
				want := slices.Clone(packets[next])
				// What no kernel looks at: the hint of lengths, the identification of what is
				// not fragmented, and checksums that were wrong before.
				for _, at := range []int{2, 3, atIP + 4, atIP + 5} {
					want[at], d[at] = 0, 0
				}
				finish(want)
				finish(d)
				if !bytes.Equal(d, want) {
					t.Fatalf("datagram %d is\n%x, want\n%x", next, d, want)
				}
				next++
			}
		}
		if next != len(packets) {
			t.Fatalf("%d datagrams come out of %d", next, len(packets))
		}
	})
}

// Datagrams that wait in the queue are carried in few frames, and arrive one by one,
// in order, with good checksums: also where a kernel forwards them over a link that
// leaves checksums and cutting to nobody.
func TestKernelCoalescesUDP(t *testing.T) {
	for name, o := range map[string]linkOption{"full": linkVariants["full"], "one lane": linkVariants["one lane"], "sealed": linkVariants["sealed"], "primary plain": linkVariants["primary plain"]} {
		t.Run(name, func(t *testing.T) {
			netlab.Clean(t)
			l := newLink(t, o)
			beyond := netlab.New(t)
			l.primary.Run(t, "ip", "link", "add", "out", "type", "veth", "peer", "name", "eth0", "netns", beyond.Name)
			for _, c := range []struct {
				ns   *netlab.Namespace
				line []string
			}{
				{l.primary, []string{"ip", "addr", "add", "10.1.0.1/24", "dev", "out"}},
				{l.primary, []string{"ip", "link", "set", "out", "up"}},
				{l.primary, []string{"ethtool", "-K", "out", "tx", "off", "gso", "off"}},
				{l.primary, []string{"sysctl", "-qw", "net.ipv4.ip_forward=1"}},
				{beyond, []string{"ip", "addr", "add", "10.1.0.2/24", "dev", "eth0"}},
				{beyond, []string{"ip", "link", "set", "eth0", "up"}},
				{beyond, []string{"ip", "route", "add", "default", "via", "10.1.0.1"}},
				{l.child, []string{"ip", "route", "add", "default", "via", primaryIP}},
				// Else the datagrams wait for ARP, and too many of them are dropped.
				{l.primary, []string{"ping", "-q", "-c", "1", "-w", "30", "10.1.0.2"}},
			} {
				c.ns.Run(t, c.line[0], c.line[1:]...)
			}
			uso := l.offloads[0].And(l.offloads[1])&wire.OffloadUSO4 != 0
			if err := l.queues[1][0].SetOffloads(l.offloads[0].And(l.offloads[1])); err != nil {
				t.Fatal(err)
			}
			sender, receiver := udp(t, l.child, beyond, "10.1.0.2")
			raw, err := receiver.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var inner error
			if err := raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20) }); err != nil || inner != nil {
				t.Fatal(errors.Join(err, inner))
			}
			// The queue of a TUN holds 500, and nobody reads it yet.
			const count = 400
			want := func(i int) []byte { return fmt.Appendf(payload(64+i%2*(i/200), byte(i)), "%04d", i) }
			for i := range count {
				if _, err := sender.Write(want(i)); err != nil {
					t.Fatal(err)
				}
			}
			l.begin(t)
			b := make([]byte, 1<<16)
			for i := range count {
				if n, err := receiver.Read(b); err != nil || !bytes.Equal(b[:n], want(i)) {
					t.Fatalf("datagram %d: got %q, %v, want %q", i, b[:n], err, want(i))
				}
			}
			l.end(t, nil)
			s := l.counters[1].Snapshot()
			// The first 200 are of one size; of the others each is longer than the one before
			// or shorter.
			if few := uint64(200/maxCoalesced + 1 + 100 + 10); uso != (s.TxPackets <= few) {
				t.Errorf("%d datagrams in %d frames, with USO %t: want at most %d with it", count, s.TxPackets, uso, few)
			}
			if drops := l.counters[0].Snapshot().Drops; drops["ipv6"] != 0 && len(drops) > 1 || drops["ipv6"] == 0 && len(drops) > 0 {
				t.Errorf("dropped: %v", drops)
			}
		})
	}
}
