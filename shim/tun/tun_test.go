package tun

import (
	"bytes"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/pump"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// within runs f on a thread inside the namespace and returns its error.
func within(t *testing.T, ns *netlab.Namespace, f func() error) error {
	t.Helper()
	var err error
	ns.Do(t, func() { err = f() })
	return err
}

func attach(t *testing.T, ns *netlab.Namespace, name string, n int, vnet bool) []*Queue {
	t.Helper()
	var queues []*Queue
	if err := within(t, ns, func() (err error) { queues, err = Attach(name, n, vnet); return err }); err != nil {
		t.Fatalf("attach %d queues of %s: %v", n, name, err)
	}
	t.Cleanup(func() {
		if err := CloseAll(queues); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Errorf("close queues of %s: %v", name, err)
		}
	})
	return queues
}

func TestCreatePersistsWithoutQueues(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	if err := within(t, ns, func() error { return Create("eth0") }); err != nil {
		t.Fatal(err)
	}
	out := ns.Run(t, "ip", "-d", "link", "show", "eth0")
	for _, want := range []string{"tun type tun", "vnet_hdr", "multi_queue", "persist"} {
		if !strings.Contains(out, want) {
			t.Errorf("ip -d link show eth0: %q is missing in\n%s", want, out)
		}
	}
	if err := within(t, ns, func() error { return Create("eth0") }); !errors.Is(err, unix.EBUSY) {
		t.Errorf("create it again: got %v, want EBUSY", err)
	}
	q := attach(t, ns, "eth0", 2, true)
	if err := CloseAll(q); err != nil {
		t.Fatal(err)
	}
	ns.Run(t, "ip", "link", "show", "eth0") // still there
	ns.Run(t, "ip", "link", "del", "eth0")
}

func TestAttachRefusesOtherLinks(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	ns.Run(t, "ip", "tuntap", "add", "dev", "single", "mode", "tun")
	for _, tt := range []struct {
		name string
		n    int
		want error
	}{
		{"lo", 1, unix.EINVAL},
		{"single", 1, unix.EINVAL}, // not multi-queue
		{"a-name-too-long-for-linux", 1, unix.EINVAL},
	} {
		err := within(t, ns, func() error { _, err := Attach(tt.name, tt.n, true); return err })
		if !errors.Is(err, tt.want) {
			t.Errorf("attach %s: got %v, want %v", tt.name, err, tt.want)
		}
	}
	for _, n := range []int{0, -1, MaxQueues + 1} {
		if err := within(t, ns, func() error { _, err := Attach("x", n, true); return err }); err == nil {
			t.Errorf("attach %d queues: got no error", n)
		}
	}
}

func TestPassedDescriptor(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	first := attach(t, ns, "eth0", 1, true)[0]
	ns.Run(t, "ip", "link", "set", "eth0", "up")

	var fd int
	if err := first.control("duplicate", func(have int) (err error) {
		fd, err = unix.FcntlInt(uintptr(have), unix.F_DUPFD_CLOEXEC, 0)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	// As it may come from a process that does not care: blocking.
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
	q, err := FromFile(os.NewFile(uintptr(fd), "passed"))
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if q.Name() != "eth0" || !q.VnetHeader() {
		t.Errorf("passed queue: name %q vnet %t, want eth0 true", q.Name(), q.VnetHeader())
	}
	// A reader that waits must be woken by a deadline: that is how a pump ends.
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := q.Read(make([]byte, 2000)); err != nil {
				done <- err
				return
			}
		}
	}()
	if err := q.SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("woken reader: got %v, want deadline exceeded", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the reader was not woken within 30 s")
	}
}

func TestFromFileRefusesOtherFiles(t *testing.T) {
	netlab.Clean(t)
	for _, path := range []string{"/dev/null", device} {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := FromFile(f); !errors.Is(err, ErrNotTun) {
			t.Errorf("FromFile(%s): got %v, want ErrNotTun", path, err)
		}
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("FromFile(%s) left the file open", path)
		}
	}
}

func TestOffloads(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	q := attach(t, ns, "eth0", 1, true)[0]
	o, err := q.ProbeOffloads()
	if err != nil {
		t.Fatal(err)
	}
	if o != pump.AllOffloads && o != pump.OffloadLadder[1] {
		t.Errorf("probe: got %s, want one of the upper rungs of the ladder", o)
	}
	for _, o := range pump.OffloadLadder[1:] {
		if err := q.SetOffloads(o); err != nil {
			t.Errorf("set %s: %v", o, err)
		}
	}
	if err := q.SetOffloads(pump.OffloadTSO4); !errors.Is(err, unix.EINVAL) {
		t.Errorf("TSO without checksums: got %v, want EINVAL", err)
	}
}

func TestPlainQueue(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	if err := within(t, ns, func() error { return Create("eth0") }); err != nil {
		t.Fatal(err)
	}
	var q *Queue
	if err := within(t, ns, func() (err error) { q, err = OpenPlain("eth0", true); return err }); err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if q.VnetHeader() {
		t.Error("a plain queue says that it has virtio-net headers")
	}
	if o, err := q.ProbeOffloads(); o != 0 || err != nil {
		t.Errorf("probe on a plain queue: got %s, %v", o, err)
	}
	if err := q.SetOffloads(pump.OffloadCsum); err == nil {
		t.Error("offloads on a plain queue: got no error")
	}
	var flags int
	if err := q.control("flags", func(fd int) (err error) {
		flags, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		return err
	}); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("close-on-exec: flags %#x, %v", flags, err)
	}
	ns.Run(t, "ip", "addr", "add", "10.9.0.1/30", "dev", "eth0")
	ns.Run(t, "ip", "link", "set", "eth0", "up")
	send(t, ns, "10.9.0.2:7", 40, 9)
	if p := receive(t, q, "10.9.0.2", 9); len(p) != 28+40 {
		t.Errorf("packet of %d bytes, want 68", len(p))
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	ns.Run(t, "ip", "link", "del", "eth0") // still there: it is persistent
}

// send sends a UDP datagram of n bytes, each equal to mark.
func send(t *testing.T, ns *netlab.Namespace, to string, n int, mark byte) {
	t.Helper()
	if err := within(t, ns, func() error {
		c, err := net.Dial("udp4", to)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(bytes.Repeat([]byte{mark}, n))
		return err
	}); err != nil {
		t.Fatalf("send %d bytes to %s: %v", n, to, err)
	}
}

// receive returns the first packet that goes to dst and ends with mark.
func receive(t *testing.T, q *Queue, dst string, mark byte) []byte {
	t.Helper()
	if err := q.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	want := net.ParseIP(dst).To4()
	for {
		b := make([]byte, 70000)
		n, err := q.Read(b)
		if err != nil {
			t.Fatalf("wait for a packet to %s on queue of %s: %v", dst, q.Name(), err)
		}
		p := b[:n]
		if q.VnetHeader() {
			p = p[pump.VnetHeaderBytes:]
		}
		if len(p) > 20 && p[0]>>4 == 4 && bytes.Equal(p[16:20], want) && p[len(p)-1] == mark {
			return p
		}
	}
}

func TestSteering(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	var q []*Queue
	if err := within(t, ns, func() (err error) { q, err = AttachLanes("eth0", 2, true); return err }); err != nil {
		t.Fatal(err)
	}
	defer CloseAll(q)
	if len(q) != 2 {
		t.Fatalf("%d queues, want 2: this kernel has steering programs", len(q))
	}
	ns.Run(t, "ip", "addr", "add", "10.9.0.1/30", "dev", "eth0")
	ns.Run(t, "ip", "link", "set", "eth0", "mtu", "1400", "up")

	// The order matters: a flow becomes bulk by its second datagram here.
	for i, tt := range []struct {
		name  string
		bytes int
		port  string
		queue int
	}{
		{"small datagram", 64, "10.9.0.2:53", pump.LaneLatency},
		{"large datagram", 1200, "10.9.0.2:443", pump.LaneBulk},
		{"fragmented datagram", 8192, "10.9.0.2:9", pump.LaneBulk},
		{"another small flow", 64, "10.9.0.2:443", pump.LaneLatency}, // another source port
	} {
		send(t, ns, tt.port, tt.bytes, byte(i+1))
		if p := receive(t, q[tt.queue], "10.9.0.2", byte(i+1)); len(p) == 0 {
			t.Errorf("%s: empty", tt.name)
		}
	}

	// One flow: small, large, small.
	if err := within(t, ns, func() error {
		c, err := net.Dial("udp4", "10.9.0.2:4433")
		if err != nil {
			return err
		}
		defer c.Close()
		for i, n := range []int{50, 1000, 50} {
			if _, err := c.Write(bytes.Repeat([]byte{byte(20 + i)}, n)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	receive(t, q[pump.LaneLatency], "10.9.0.2", 20)
	receive(t, q[pump.LaneBulk], "10.9.0.2", 21)
	receive(t, q[pump.LaneBulk], "10.9.0.2", 22)

	// A TCP SYN is bulk.
	ns.Do(t, func() {
		d := net.Dialer{Timeout: 10 * time.Millisecond}
		if c, err := d.Dial("tcp4", "10.9.0.2:80"); err == nil {
			c.Close()
		}
	})
	if err := q[0].SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	for {
		b := make([]byte, 2000)
		n, err := q[0].Read(b)
		if err != nil {
			t.Fatalf("wait for the SYN: %v", err)
		}
		if p := b[pump.VnetHeaderBytes:n]; p[0] == 0x45 && p[9] == unix.IPPROTO_TCP {
			return
		}
	}
}
