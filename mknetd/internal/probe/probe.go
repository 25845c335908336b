// Package probe sends one packet out of a network namespace and says what came
// back. It changes nothing there, and lets go of its socket at the end.
package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/policy"
)

// Packet is what is sent.
type Packet struct {
	From, To netip.Addr      // IPv4; From is an address of the namespace
	Protocol policy.Protocol // TCP (a SYN), UDP or ICMP (an echo request)
	Port     uint16          // of To, with TCP and UDP
}

// ErrProtocol is returned by Send for a protocol that it cannot speak.
var ErrProtocol = errors.New("a probe is tcp, udp or icmp")

// Wait is how long an answer may take. It is less than the first retransmission of
// a SYN (RFC 6298, section 2: 1 s), so that one packet is sent.
const Wait = 900 * time.Millisecond

// Probe is a packet that has been sent.
type Probe struct {
	packet Packet
	fd     int
}

// Send sends the packet out of ns. The caller asks for the Answer, which ends it.
func Send(ns *netns.Namespace, p Packet) (*Probe, error) {
	kind, proto := unix.SOCK_STREAM, unix.IPPROTO_TCP
	switch p.Protocol {
	case policy.TCP:
	case policy.UDP:
		kind, proto = unix.SOCK_DGRAM, unix.IPPROTO_UDP
	case policy.ICMP:
		kind, proto = unix.SOCK_RAW, unix.IPPROTO_ICMP
	default:
		return nil, fmt.Errorf("probe with protocol %s: %w", p.Protocol, ErrProtocol)
	}
	out := &Probe{packet: p}
	err := ns.Do(func() (err error) {
		if out.fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, proto); err != nil {
			return err
		}
		if err = out.send(); err != nil {
			err = errors.Join(err, unix.Close(out.fd))
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("send a probe from %s to %s: %w", p.From, p.To, err)
	}
	return out, nil
}

func (p *Probe) send() error {
	if err := unix.Bind(p.fd, &unix.SockaddrInet4{Addr: p.packet.From.As4()}); err != nil {
		return err
	}
	err := unix.Connect(p.fd, &unix.SockaddrInet4{Addr: p.packet.To.As4(), Port: int(p.packet.Port)})
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	switch p.packet.Protocol {
	case policy.UDP:
		return unix.Send(p.fd, []byte("mknet probe"), 0)
	case policy.ICMP:
		return unix.Send(p.fd, p.echo(8), 0)
	}
	return nil
}

// id is the identifier of the echo request: that of the socket, so that two probes
// differ.
func (p *Probe) id() uint16 { return uint16(p.fd)<<8 | 0x6d }

// echo is an ICMP message of 8 bytes (RFC 792).
func (p *Probe) echo(kind uint8) []byte {
	b := []byte{kind, 0, 0, 0, 0, 0, 0, 1}
	binary.BigEndian.PutUint16(b[4:], p.id())
	sum := uint32(kind)<<8 + uint32(p.id()) + 1
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum))
	return b
}

// Answer waits for what comes back, at most for Wait or until ctx ends, and says it
// in words.
func (p *Probe) Answer(ctx context.Context) (string, error) {
	defer func() {
		if p.packet.Protocol == policy.TCP {
			// A connection that stands goes with a RST, and leaves nothing behind.
			_ = unix.SetsockoptLinger(p.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
		_ = unix.Close(p.fd)
	}()
	events := int16(unix.POLLIN)
	if p.packet.Protocol == policy.TCP {
		events = unix.POLLOUT
	}
	for end := time.Now().Add(Wait); time.Now().Before(end) && ctx.Err() == nil; {
		fds := []unix.PollFd{{Fd: int32(p.fd), Events: events}}
		n, err := unix.Poll(fds, 50) // ms, so that ctx is heard
		if errors.Is(err, unix.EINTR) || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("wait for the answer to a probe: %w", err)
		}
		if said, err := p.read(); said != "" || err != nil {
			return said, err
		}
	}
	return "no answer within " + Wait.String(), nil
}

// read says what came, nothing where it is another's.
func (p *Probe) read() (string, error) {
	refused, err := unix.GetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return "", fmt.Errorf("read the answer to a probe: %w", err)
	}
	if refused != 0 {
		return "refused: " + unix.Errno(refused).Error(), nil
	}
	if p.packet.Protocol == policy.TCP {
		return "answered: connected", nil
	}
	buf := make([]byte, 2048)
	n, err := unix.Read(p.fd, buf)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return "", nil
	case err != nil:
		return "refused: " + err.Error(), nil
	case p.packet.Protocol == policy.UDP:
		return fmt.Sprintf("answered: %d bytes", n), nil
	}
	// A raw socket gets the IP header as well (raw(7)).
	if n > 0 {
		if header := int(buf[0]&15) * 4; n >= header+8 && buf[header] == 0 && binary.BigEndian.Uint16(buf[header+4:]) == p.id() {
			return "answered: echo reply", nil
		}
	}
	return "", nil
}
