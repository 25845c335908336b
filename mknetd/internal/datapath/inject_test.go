package datapath

import (
	"encoding/binary"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func deadline() time.Time { return time.Now().Add(patience) }

// frame is a frame of the pod to its gateway.
func (p *livePod) frame(ip ipv4) []byte {
	if !ip.src.IsValid() {
		ip.src = p.Address
	}
	return frame{src: p.Generation.PeerMAC(), dst: p.Generation.HostMAC(), ip: &ip}.bytes()
}

// inject sends a frame as it is from inside the pod.
func (p *livePod) inject(t *testing.T, data []byte) {
	t.Helper()
	p.packet(t, data, 0)
}

// injectNonLinear sends a frame of which only the Ethernet header is in the linear
// part of the sk_buff. PACKET_VNET_HDR says how much of a packet that exceeds a
// page is (net/packet/af_packet.c: packet_alloc_skb).
func (p *livePod) injectNonLinear(t *testing.T, data []byte) {
	t.Helper()
	header := make([]byte, 10) // struct virtio_net_hdr
	binary.NativeEndian.PutUint16(header[2:], 14)
	p.packet(t, append(header, data...), 1)
}

func (p *livePod) packet(t *testing.T, data []byte, vnetHeader int) {
	t.Helper()
	p.ns.Do(t, func() {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		eth0, err := net.InterfaceByName("eth0")
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, vnetHeader)
		}
		if err == nil {
			err = unix.Sendto(fd, data, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Index, Protocol: 0x0008})
		}
		if err != nil {
			t.Errorf("inject %d bytes: %v", len(data), err)
		}
	})
}
