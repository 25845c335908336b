package topo

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestOpenQueues(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	if _, _, err := b.OpenQueues(t.Context(), ep, b.ns, 2); err == nil {
		t.Error("OpenQueues without a TUN succeeded")
	}
	b.build(t, ep)
	queues, vnet, err := b.OpenQueues(t.Context(), ep, b.ns, 2)
	if err != nil || !vnet || len(queues) != 2 {
		t.Fatalf("OpenQueues = %d queues, %v, %v", len(queues), vnet, err)
	}
	if out := b.lab.Run(t, "ip", "-d", "link", "show", "eth0"); !strings.Contains(out, "numqueues 2") {
		t.Errorf("two queues: %s", out)
	}
	b.healthy(t, ep)
	// Fencing ends the old descriptors.
	if err := b.RecreateTun(t.Context(), ep, b.ns, nil); err != nil {
		t.Fatal(err)
	}
	b.healthy(t, ep)
	packet := make([]byte, 64)
	for i, q := range queues {
		if _, err := q.Write(packet); err == nil {
			t.Errorf("queue %d still takes packets after RecreateTun", i)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}
	fresh, _, err := b.OpenQueues(t.Context(), ep, b.ns, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range fresh {
		q.Close()
	}
	for _, n := range []int{0, -1, MaxQueues + 1} {
		if _, _, err := b.OpenQueues(t.Context(), ep, b.ns, n); err == nil {
			t.Errorf("OpenQueues(%d) succeeded", n)
		}
	}
	// All or none: the kernel has no more than MaxQueues for a device.
	held, _, err := b.OpenQueues(t.Context(), ep, b.ns, 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.OpenQueues(t.Context(), ep, b.ns, MaxQueues-1); err == nil {
		t.Error("OpenQueues beyond what the device has succeeded")
	}
	if n := countTunFiles(t); n != 2 {
		t.Errorf("%d descriptors of /dev/net/tun are open, want the 2 that are held", n)
	}
	for _, q := range held {
		q.Close()
	}
	if n := countTunFiles(t); n != 0 {
		t.Errorf("%d descriptors of /dev/net/tun are open", n)
	}
}

func countTunFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if target, _ := os.Readlink("/proc/self/fd/" + e.Name()); target == "/dev/net/tun" {
			n++
		}
	}
	return n
}

// Packets take the way that the tables promise, also with a strict reverse-path
// filter for the whole namespace: in by each TUN, to the primary, and back.
func TestPacketsReturnByTheirOwnInterface(t *testing.T) {
	b := newBench(t)
	b.lab.Run(t, "sysctl", "-w", "net.ipv4.conf.all.rp_filter=1")
	for n, name := range []string{"eth0", "net1"} {
		ep := record(t, endpoint.NewGeneration(), n, name)
		b.build(t, ep)
		queues, _, err := b.OpenQueues(t.Context(), ep, b.ns, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer queues[0].Close()
		echo := icmpEcho(ep.Address, netip.MustParseAddr(netlab.HostAddr))
		if _, err := queues[0].Write(append(make([]byte, 10), echo...)); err != nil { // an empty virtio-net header
			t.Fatal(err)
		}
		if err := queues[0].SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2048)
		for {
			size, err := queues[0].Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: no reply came back by this TUN", name)
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			p := buf[10:size]
			if len(p) >= 28 && p[9] == 1 && p[20] == 0 && slices.Equal(p[16:20], ep.Address.AsSlice()) {
				break
			}
		}
	}
}

// icmpEcho is an IPv4 echo request (RFC 791, RFC 792).
func icmpEcho(src, dst netip.Addr) []byte {
	p := make([]byte, 28)
	p[0], p[8], p[9] = 0x45, 64, 1
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	binary.BigEndian.PutUint16(p[10:], checksum(p[:20]))
	p[20] = 8
	binary.BigEndian.PutUint16(p[22:], checksum(p[20:]))
	return p
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
