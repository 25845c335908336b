package pump

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// How much is moved, and how often programs are killed. The long mode is
// MKNET_LOAD_MIB=1024 MKNET_RESTARTS=10000.
func loadBytes(t *testing.T) int64 { return int64(fromEnv(t, "MKNET_LOAD_MIB", 64)) << 20 }
func restarts(t *testing.T) int    { return fromEnv(t, "MKNET_RESTARTS", 30) }

func fromEnv(t *testing.T, name string, fallback int) int {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return fallback
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: must be a number above 0", name, s)
	}
	return n
}

// offloadModes are what the egress may do: hand on packets of 64 KiB with partial
// checksums, or have the kernel cut and complete them before it sends.
var offloadModes = []struct{ name, value string }{{"offloads on", "on"}, {"offloads off", "off"}}

// setOffloads changes both ends of the host's uplink.
func setOffloads(t *testing.T, n *node.Node, value string) {
	t.Helper()
	args := []string{"tx", value, "sg", value, "tso", value, "gso", value, "gro", value, "tx-udp-segmentation", value}
	netlab.Run(t, "ethtool", append([]string{"-K", netlab.UplinkName}, args...)...)
	n.Internet.Run(t, "ethtool", append([]string{"-K", "inet0"}, args...)...)
}

// Bulk transfers in both directions arrive unchanged, whatever the egress
// offloads, and no receiver sees a bad checksum.
func TestBulkTransfersKeepTheirHash(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	size := loadBytes(t)
	for _, mode := range offloadModes {
		t.Run(mode.name, func(t *testing.T) {
			setOffloads(t, n, mode.value)
			for _, way := range []struct {
				name string
				up   bool
			}{{"from the child", true}, {"to the child", false}} {
				begin := time.Now()
				sent, got, err := transfer(t, n.Internet, child.Namespace, size, way.up)
				if err != nil {
					t.Fatalf("%s: %v", way.name, err)
				}
				if !bytes.Equal(sent, got) {
					t.Errorf("%s: %d bytes arrived as others", way.name, size)
				}
				took := time.Since(begin)
				t.Logf("%s: %d MiB in %s, %.2f Gbit/s", way.name, size>>20, took.Round(time.Millisecond), float64(size)*8/1e9/took.Seconds())
			}
			noBadChecksums(t, n.Internet, child.Namespace)
		})
	}
}

// transfer moves size bytes over one TCP connection that the child opens, and
// returns the hashes of what was sent and of what arrived.
func transfer(t *testing.T, internet, child *netlab.Namespace, size int64, up bool) (sent, got []byte, err error) {
	t.Helper()
	var l net.Listener
	internet.Do(t, func() { l, err = net.Listen("tcp4", netlab.InternetAddr+":0") })
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	type end struct {
		sum []byte
		err error
	}
	far := make(chan end, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			far <- end{nil, err}
			return
		}
		sum, err := half(conn, size, !up)
		far <- end{sum, err}
	}()
	var conn net.Conn
	child.Do(t, func() { conn, err = net.DialTimeout("tcp4", l.Addr().String(), node.Patience) })
	if err != nil {
		return nil, nil, err
	}
	near, err := half(conn, size, up)
	if err != nil {
		_ = l.Close() // the other end ends with its connection
	}
	other := <-far
	if err := errors.Join(err, other.err); err != nil {
		return nil, nil, err
	}
	if up {
		return near, other.sum, nil
	}
	return other.sum, near, nil
}

// half sends size random bytes or receives them, closes, and returns their hash.
func half(conn net.Conn, size int64, send bool) ([]byte, error) {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute + time.Duration(size>>20)*time.Second)); err != nil {
		return nil, err
	}
	sum := sha256.New()
	if !send {
		_, err := io.CopyN(sum, conn, size)
		return sum.Sum(nil), err
	}
	source := rand.NewChaCha8([32]byte{byte(size >> 20), 1})
	buf := make([]byte, 256<<10)
	for size > 0 {
		b := buf[:min(size, int64(len(buf)))]
		_, _ = source.Read(b) // never fails
		sum.Write(b)
		if _, err := conn.Write(b); err != nil {
			return nil, err
		}
		size -= int64(len(b))
	}
	return sum.Sum(nil), nil
}

// noBadChecksums reads what the stacks of the namespaces have refused.
func noBadChecksums(t *testing.T, namespaces ...*netlab.Namespace) {
	t.Helper()
	for _, ns := range namespaces {
		for protocol, n := range csumErrors(t, ns) {
			if n != 0 {
				t.Errorf("namespace %s: %d bad %s checksums", ns.Name, n, protocol)
			}
		}
	}
}

// csumErrors is InCsumErrors of every protocol in /proc/net/snmp.
func csumErrors(t *testing.T, ns *netlab.Namespace) map[string]int {
	t.Helper()
	errs, names := map[string]int{}, map[string][]string{}
	for line := range strings.Lines(ns.Run(t, "cat", "/proc/net/snmp")) {
		protocol, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if names[protocol] == nil {
			names[protocol] = fields
			continue
		}
		for i, name := range names[protocol] {
			if name == "InCsumErrors" {
				errs[protocol], _ = strconv.Atoi(fields[i])
			}
		}
	}
	if len(errs) < 3 { // Icmp, Tcp, Udp
		t.Fatalf("/proc/net/snmp of %s counts bad checksums of %v only", ns.Name, errs)
	}
	return errs
}

// Datagrams that a child sends in one piece for the kernel to cut (USO) come out
// of the MASQUERADE as the datagrams that were meant, and so do the answers.
func TestSegmentedDatagramsKeepTheirBoundaries(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	const each, count, short = 1000, 30, 7 // the last datagram is a short one
	for _, mode := range offloadModes {
		t.Run(mode.name, func(t *testing.T) {
			setOffloads(t, n, mode.value)
			far, near := udpSocket(t, n.Internet, netlab.InternetAddr+":0"), udpSocket(t, child.Namespace, ep.Address.String()+":0")
			for _, s := range []*net.UDPConn{far, near} {
				segment(t, s, each)
			}
			before := shimStats(t, n, ep).Counters
			to := far.LocalAddr().(*net.UDPAddr).AddrPort()
			for round := range 20 {
				payload := make([]byte, each*count+short)
				_, _ = rand.NewChaCha8([32]byte{byte(round)}).Read(payload) // never fails
				if _, err := near.WriteToUDPAddrPort(payload, to); err != nil {
					t.Fatal(err)
				}
				from := datagrams(t, far, payload, each)
				if from.String() == near.LocalAddr().String() || from.IP.String() != netlab.HostAddr {
					t.Fatalf("round %d: datagrams come from %s, want the host's address", round, from)
				}
				if _, err := far.WriteToUDP(payload, from); err != nil {
					t.Fatal(err)
				}
				datagrams(t, near, payload, each)
			}
			after := shimStats(t, n, ep).Counters
			t.Logf("%d datagrams each way in %d and %d packets at the pump", 20*(count+1), after.RxPackets-before.RxPackets, after.TxPackets-before.TxPackets)
			if got := after.RxPackets - before.RxPackets; got > 20*10 {
				t.Errorf("the child's kernel cut the datagrams itself: %d packets", got)
			}
			noBadChecksums(t, n.Internet, child.Namespace)
		})
	}
}

func udpSocket(t *testing.T, ns *netlab.Namespace, addr string) *net.UDPConn {
	t.Helper()
	var conn net.PacketConn
	var err error
	ns.Do(t, func() { conn, err = net.ListenPacket("udp4", addr) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() }) // a second time where the test did
	return conn.(*net.UDPConn)
}

// segment makes the kernel cut what a socket sends (UDP_SEGMENT, udp(7)).
func segment(t *testing.T, s *net.UDPConn, size int) {
	t.Helper()
	raw, err := s.SyscallConn()
	if err == nil {
		var inner error
		err = raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size) })
		err = errors.Join(err, inner)
	}
	if err != nil {
		t.Fatalf("UDP_SEGMENT: %v", err)
	}
}

// datagrams receives a payload in pieces of the given size, in order, and returns
// who sent them.
func datagrams(t *testing.T, s *net.UDPConn, want []byte, size int) *net.UDPAddr {
	t.Helper()
	if err := s.SetReadDeadline(time.Now().Add(node.Patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	var from *net.UDPAddr
	for i := 0; len(want) > 0; i++ {
		n, addr, err := s.ReadFromUDP(buf)
		if err != nil {
			t.Fatalf("datagram %d: %v", i, err)
		}
		piece := want[:min(size, len(want))]
		if !bytes.Equal(buf[:n], piece) {
			t.Fatalf("datagram %d: %d bytes, want %d and the same ones", i, n, len(piece))
		}
		want, from = want[len(piece):], addr
	}
	return from
}
