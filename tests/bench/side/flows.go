package side

import (
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"strconv"

	"golang.org/x/net/ipv4"
)

// firstSource is the source port of the first flow.
const firstSource = 10_000

// flows sends datagrams of which each begins a flow: no two have the same source
// port. They go out of a raw socket, for a bound one a datagram would cost more than
// what is measured.
func flows(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("flows", flag.ContinueOnError)
	to := fs.String("to", "", "address of the receiver")
	port := fs.String("port", udpPort, "of the receiver")
	count := fs.Int("count", 10_000, "how many flows")
	if err := fs.Parse(args); err != nil {
		return err
	}
	number, err := strconv.ParseUint(*port, 10, 16)
	if err != nil {
		return fmt.Errorf("-port: %w", err)
	}
	if *count < 1 || *count > 1<<16-firstSource {
		return fmt.Errorf("-count %d: must be 1 to %d", *count, 1<<16-firstSource)
	}
	addr := net.ParseIP(*to)
	c, err := net.ListenPacket("ip4:udp", "0.0.0.0")
	if err != nil {
		return err
	}
	defer c.Close()
	conn := ipv4.NewPacketConn(c)
	messages := make([]ipv4.Message, atOnce)
	const bytes = 8 + 64 // header and payload
	for i := range messages {
		b := make([]byte, bytes) // a checksum of zero is none, RFC 768
		binary.BigEndian.PutUint16(b[2:], uint16(number))
		binary.BigEndian.PutUint16(b[4:], bytes)
		messages[i] = ipv4.Message{Buffers: [][]byte{b}, Addr: &net.IPAddr{IP: addr}}
	}
	before, err := cpuSeconds()
	if err != nil {
		return err
	}
	for sent := 0; sent < *count; {
		batch := messages[:min(atOnce, *count-sent)]
		for i := range batch {
			binary.BigEndian.PutUint16(batch[i].Buffers[0], uint16(firstSource+sent+i))
		}
		for rest := batch; len(rest) > 0; {
			n, err := conn.WriteBatch(rest, 0)
			if err != nil {
				return err
			}
			rest = rest[n:]
		}
		sent += len(batch)
	}
	after, err := cpuSeconds()
	if err != nil {
		return err
	}
	return say(out, Sent{CPUSeconds: after - before})
}
