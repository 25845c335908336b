package link

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"mknet/tests/bench/side"
	"mknet/tests/netlab"
)

// Link is one way to carry packets between the namespaces.
type Link struct {
	Name string
	Peer bool // somebody else's program
	// start makes it, in namespaces that are up. It need not carry packets yet.
	start func(l *lab) error
}

// Links are all there are. Names are those of the figures.
var Links = []Link{
	{Name: "veth", start: veth},
	{Name: side.Naive, start: ours(side.Naive)},
	{Name: side.Plain, start: ours(side.Plain)},
	{Name: side.Single, start: ours(side.Single)},
	{Name: side.Full, start: ours(side.Full)},
	{Name: Urgent, start: ours(side.Full, "nice", "-n", "-15")},
	{Name: side.Sealed, start: ours(side.Sealed)},
	{Name: "wireguard-go", Peer: true, start: wireguard},
	{Name: "gvisor-tap-vsock", Peer: true, start: gvisor},
	{Name: "slirp4netns", Peer: true, start: slirp},
	{Name: "socat", Peer: true, start: socat},
}

// mtu is as the peers' command lines want it.
var mtu = strconv.Itoa(side.MTUBytes)

// join makes a veth between the namespaces.
func (l *lab) join(mtuBytes int, addresses [2]string) error {
	m := strconv.Itoa(mtuBytes)
	if _, err := netlab.Try("ip", "link", "add", "v0", "mtu", m, "netns", near,
		"type", "veth", "peer", "name", "v0", "mtu", m, "netns", far); err != nil {
		return err
	}
	return errors.Join(l.configure(near, "v0", addresses[0], mtuBytes), l.configure(far, "v0", addresses[1], mtuBytes))
}

func veth(l *lab) error {
	l.to = farIP
	return l.join(side.MTUBytes, [2]string{nearIP, farIP})
}

// Urgent is the full pump with a nice value of -15, as mk-shim --priority -15.
const Urgent = "urgent"

// ours starts both ends of a pump of ours, by way of the command by, if any.
func ours(mode string, by ...string) func(l *lab) error {
	return func(l *lab) error {
		l.to = farIP
		for _, ns := range []string{far, near} {
			args := []string{
				side.Command, "pump", "-mode", mode, "-tun", "mkn0",
				"-socket", filepath.Join(l.dir, "pump.sock"), "-listen=" + strconv.FormatBool(ns == far),
			}
			if l.profile != "" {
				args = append(args, "-profile", filepath.Join(l.profile, mode+"-"+ns+".pprof"))
			}
			cmd := append(append(slices.Clone(by), l.self), args...)
			if err := l.start(&l.carrier, ns, nil, cmd[0], cmd[1:]...); err != nil {
				return err
			}
		}
		return l.tuns("mkn0")
	}
}

// tuns configures a TUN of this name at both ends.
func (l *lab) tuns(name string) error {
	return errors.Join(
		l.configure(far, name, farIP, side.MTUBytes), l.configure(near, name, nearIP, side.MTUBytes))
}

func socat(l *lab) error {
	l.to = farIP
	socket := filepath.Join(l.dir, "socat.sock")
	tun := func(ip string) string { return "TUN:" + ip + "/24,tun-name=mkn0,iff-up,iff-no-pi" }
	// Type 5 is SOCK_SEQPACKET, which keeps the boundaries of packets.
	if err := l.start(&l.carrier, far, nil, "socat", "-b", "65536", "UNIX-LISTEN:"+socket+",type=5", tun(farIP)); err != nil {
		return err
	}
	if err := l.start(&l.carrier, near, nil, "socat", "-b", "65536", tun(nearIP), "UNIX-CONNECT:"+socket+",type=5,retry=100,interval=0.05"); err != nil {
		return err
	}
	return l.tuns("mkn0")
}

func slirp(l *lab) error {
	l.to = "10.0.2.2" // slirp4netns(1): the far namespace's loopback
	return l.start(&l.carrier, far, nil, "slirp4netns", "--configure", "--mtu="+mtu,
		"--netns-type=path", "/run/netns/"+near, "tap0")
}

func gvisor(l *lab) error {
	l.to, l.noPing = "192.168.127.254", true // its name for the far namespace's loopback
	socket := filepath.Join(l.dir, "gv.sock")
	if err := l.start(&l.carrier, far, nil, filepath.Join(l.peers, "gvproxy"), "-mtu", mtu, "-listen", "unix://"+socket, "-ssh-port", "-1"); err != nil {
		return err
	}
	if err := l.wait("gvproxy", func() error {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			err = conn.Close()
		}
		return err
	}); err != nil {
		return err
	}
	// The address is the one that its DHCP keeps for this MAC, so that ours is not
	// given to another.
	for _, c := range [][]string{
		{"tuntap", "add", "tap0", "mode", "tap"},
		{"link", "set", "tap0", "address", "5a:94:ef:e4:0c:ee", "mtu", mtu},
	} {
		if err := l.in(near, "ip", c...); err != nil {
			return err
		}
	}
	if err := l.start(&l.carrier, near, nil, filepath.Join(l.peers, "vm"), "-url", "unix://"+socket, "-mtu", mtu, "-iface", "tap0", "-preexisting"); err != nil {
		return err
	}
	return l.configure(near, "tap0", "192.168.127.2", side.MTUBytes)
}

// wireguard runs an end in each namespace over a veth, as it would over a network.
func wireguard(l *lab) error {
	l.to = farIP
	outer := [2]string{"10.8.0.1", "10.8.0.2"}
	if err := l.join(1500, outer); err != nil {
		return err
	}
	var keys [2]*ecdh.PrivateKey
	for i := range keys {
		var err error
		if keys[i], err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
			return err
		}
	}
	names, addresses := [2]string{"wg0", "wg1"}, [2]string{nearIP, farIP}
	for i, ns := range []string{near, far} {
		if err := l.start(&l.carrier, ns, []string{"LOG_LEVEL=error"}, filepath.Join(l.peers, "wireguard"), "-f", names[i]); err != nil {
			return err
		}
		// The protocol of wireguard.com/xplatform, "Configuration Protocol".
		request := fmt.Sprintf("set=1\nprivate_key=%s\nlisten_port=%d\nreplace_peers=true\npublic_key=%s\nendpoint=%s:%d\nallowed_ip=%s/32\n\n",
			hex.EncodeToString(keys[i].Bytes()), 5000+i, hex.EncodeToString(keys[1-i].PublicKey().Bytes()), outer[1-i], 5001-i, addresses[1-i])
		if err := l.wait("wireguard", func() error { return uapi("/var/run/wireguard/"+names[i]+".sock", request) }); err != nil {
			return err
		}
		if err := l.configure(ns, names[i], addresses[i], side.MTUBytes); err != nil {
			return err
		}
	}
	return nil
}

func uapi(socket, request string) error {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(side.Patience)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte(request)); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, err := conn.Read(answer)
	if err == nil && !strings.Contains(string(answer[:n]), "errno=0\n") {
		err = fmt.Errorf("answer %q", answer[:n])
	}
	return err
}
