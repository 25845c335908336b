package engine

import (
	"net/netip"
	"strings"
	"testing"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// knownEnds are endpoints with every kind of name, and names that several have.
func knownEnds() []endpoint.Endpoint {
	at := func(first byte, address, containerID, ifName string, state endpoint.State, pod endpoint.Pod) endpoint.Endpoint {
		return endpoint.Endpoint{
			Generation: endpoint.Generation{0xab, first}, Address: netip.MustParseAddr(address), State: state, Pod: pod,
			Attachment: endpoint.Attachment{Network: "mknet", ContainerID: containerID, IfName: ifName},
		}
	}
	return []endpoint.Endpoint{
		at(0x01, "10.88.0.2", "c1", "eth0", endpoint.Ready, endpoint.Pod{Namespace: "shop", Name: "web"}),
		at(0x02, "10.88.0.3", "c2", "eth0", endpoint.Deleting, endpoint.Pod{Namespace: "shop", Name: "web"}), // its predecessor
		at(0x03, "172.30.0.2", "child", "eth0", endpoint.Ready, endpoint.Pod{}),
		at(0x04, "10.88.0.4", "two", "eth0", endpoint.Ready, endpoint.Pod{Namespace: "shop", Name: "db"}),
		at(0x05, "10.88.0.5", "two", "net1", endpoint.Ready, endpoint.Pod{Namespace: "shop", Name: "db"}),
		at(0x06, "10.88.0.6", "late", "eth0", endpoint.Deleting, endpoint.Pod{Namespace: "shop"}),
		at(0x07, "10.88.0.7", "ab01", "eth0", endpoint.Ready, endpoint.Pod{Name: "alone"}), // digits of another's generation
	}
}

// explain, policy explain and trace take the same names and refuse with the same
// codes.
func TestWhoIsMeant(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		addr string
		port uint16
		ours bool
		code api.Code
		says string
	}{
		{text: "10.88.0.2", addr: "10.88.0.2", ours: true},
		{text: "10.88.0.2:80", addr: "10.88.0.2", ours: true, port: 80},
		{text: "10.88.0.6", addr: "10.88.0.6", ours: true},
		{text: "198.51.100.1:65535", addr: "198.51.100.1", port: 65535},
		{text: "198.51.100.1", addr: "198.51.100.1"},
		{text: "shop/web", addr: "10.88.0.2", ours: true},
		{text: "shop/web:80", addr: "10.88.0.2", ours: true, port: 80},
		{text: "shop/late", addr: "10.88.0.6", ours: true}, // without a name policy calls it so
		{text: "alone", addr: "10.88.0.7", ours: true},
		{text: "child", addr: "172.30.0.2", ours: true},
		{text: "c2", addr: "10.88.0.3", ours: true},
		{text: "mknet/two/net1", addr: "10.88.0.5", ours: true},
		{text: "mknet/two/net1:443", addr: "10.88.0.5", ours: true, port: 443},
		{text: "ab03", addr: "172.30.0.2", ours: true},
		{text: "ab03:40312", addr: "172.30.0.2", ours: true, port: 40312},
		{text: "ab050000000000000000000000000000", addr: "10.88.0.5", ours: true},
		{text: "ab01", addr: "10.88.0.7", ours: true}, // the whole of a name before the beginning of one
		{text: "", code: api.InvalidArgument, says: "names nobody"},
		{text: ":80", code: api.InvalidArgument, says: "names nobody"},
		{text: "fd00::2", code: api.InvalidArgument, says: "must be an IPv4 address"},
		{text: "[fd00::2]:80", code: api.InvalidArgument, says: "must be an IPv4 address"},
		{text: "0.0.0.0", code: api.InvalidArgument, says: "address of somebody"},
		{text: "10.88.0.2:0", code: api.InvalidArgument, says: `port "0"`},
		{text: "10.88.0.2:65536", code: api.InvalidArgument, says: `port "65536"`},
		{text: "child:http", code: api.InvalidArgument, says: `port "http"`},
		{text: "two", code: api.InvalidArgument, says: "means 2 endpoints, among them mknet/two/eth0 with 10.88.0.4"},
		{text: "shop/db", code: api.InvalidArgument, says: "means 2 endpoints"},
		{text: "ab0", code: api.NotFound, says: "no endpoint is called so"},
		{text: "ab", code: api.NotFound, says: "no endpoint is called so"},
		{text: "nobody", code: api.NotFound, says: "no endpoint is called so"},
		{text: "nobody:80", code: api.NotFound, says: "no endpoint is called so"},
		{text: "web", code: api.NotFound, says: "no endpoint is called so"},
		{text: "10.88.0.999", code: api.NotFound, says: "is no IPv4 address"},
	} {
		got, err := endOf("to", c.text, knownEnds())
		if c.code != "" {
			if api.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q: %v, want %s: %s", c.text, err, c.code, c.says)
			}
			continue
		}
		if err != nil || got.addr.String() != c.addr || got.port != c.port || (got.ep != nil) != c.ours || c.ours && got.ep.Address != got.addr {
			t.Errorf("%q: %+v, %v; want %s port %d", c.text, got, err, c.addr, c.port)
		}
	}
}

// A port may be given beside the name, not a different one.
func TestOnePort(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		own         uint16
		given, want int
		code        api.Code
	}{{0, 0, 0, ""}, {80, 0, 80, ""}, {0, 80, 80, ""}, {80, 80, 80, ""}, {80, 81, 0, api.InvalidArgument}} {
		if got, err := onePort("to", "x", c.own, c.given); got != c.want || api.CodeOf(err) != c.code {
			t.Errorf("%d and %d: %d, %v; want %d, %q", c.own, c.given, got, err, c.want, c.code)
		}
	}
}
