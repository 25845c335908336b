package side

import (
	"errors"
	"flag"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

const (
	atOnce       = 64 // datagrams in one system call
	quiet        = 300 * time.Millisecond
	receiveBytes = 4 << 20 // of the socket's buffer
)

// Datagrams is what a receiver saw.
type Datagrams struct {
	Count     uint64  `json:"count"`
	PerSecond float64 `json:"perSecond"` // between the first and the last
	// Of the receiver since it was ready; that of the sender is in its own line.
	CPUSeconds float64 `json:"cpuSeconds"`
}

// Sent is what a sender of datagrams did.
type Sent struct {
	// From the first datagram to the last: what the process's start takes is no
	// packet's.
	CPUSeconds float64 `json:"cpuSeconds"`
}

// receive counts datagrams until none comes any more. It writes an empty line when it
// is ready.
func receive(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("receive", flag.ContinueOnError)
	port := fs.String("port", udpPort, "to receive on")
	buffer := fs.Int("buffer", 0, "bytes of the socket's buffer, beyond what the host allows; 0: what it allows")
	if err := fs.Parse(args); err != nil {
		return err
	}
	pc, err := net.ListenPacket("udp4", ":"+*port)
	if err != nil {
		return err
	}
	defer pc.Close()
	if err := enlarge(pc.(*net.UDPConn), *buffer); err != nil {
		return err
	}
	conn := ipv4.NewPacketConn(pc)
	messages := make([]ipv4.Message, atOnce)
	for i := range messages {
		messages[i].Buffers = [][]byte{make([]byte, 2048)}
	}
	if _, err := io.WriteString(out, "\n"); err != nil {
		return err
	}
	before, err := cpuSeconds()
	if err != nil {
		return err
	}
	var d Datagrams
	var first, last time.Time
	wait := Patience
	for {
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		n, err := conn.ReadBatch(messages, 0)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return err
		}
		last = time.Now()
		if d.Count == 0 {
			first, wait = last, quiet
		}
		d.Count += uint64(n)
	}
	if past := last.Sub(first); past > 0 {
		d.PerSecond = float64(d.Count) / past.Seconds()
	}
	after, err := cpuSeconds()
	if err != nil {
		return err
	}
	d.CPUSeconds = after - before
	return say(out, d)
}

// enlarge gives a socket a receive buffer of n bytes, for which the right of an
// administrator is needed; without n the largest that everybody may have.
func enlarge(c *net.UDPConn, n int) error {
	if n == 0 {
		return c.SetReadBuffer(receiveBytes)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, n) }); err != nil {
		return err
	}
	return inner
}

// send sends datagrams as fast as it can.
func send(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("send", flag.ContinueOnError)
	to := fs.String("to", "", "address of the receiver")
	size := fs.Int("bytes", 64, "of each datagram's payload")
	window := fs.Duration("for", time.Second, "how long to send")
	if err := fs.Parse(args); err != nil {
		return err
	}
	c, err := net.Dial("udp4", net.JoinHostPort(*to, udpPort))
	if err != nil {
		return err
	}
	defer c.Close()
	conn := ipv4.NewPacketConn(c.(*net.UDPConn))
	messages := make([]ipv4.Message, atOnce)
	payload := make([]byte, *size)
	for i := range messages {
		messages[i].Buffers = [][]byte{payload}
	}
	before, err := cpuSeconds()
	if err != nil {
		return err
	}
	for end := time.Now().Add(*window); time.Now().Before(end); {
		_, err := conn.WriteBatch(messages, 0)
		switch {
		case err == nil, errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ECONNREFUSED):
		default:
			return err
		}
	}
	after, err := cpuSeconds()
	if err != nil {
		return err
	}
	return say(out, Sent{CPUSeconds: after - before})
}
