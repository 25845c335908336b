package netlab

import "testing"

// Addresses of the internet that Uplink builds (RFC 5737 TEST-NET-2).
const (
	HostAddr     = "198.51.100.10" // the private host's own address, on up0
	InternetAddr = "198.51.100.1"  // the internet's end, the host's default gateway
	UplinkName   = "up0"           // the host's egress
)

// Uplink gives the private host an egress up0 (198.51.100.10/24, the given MTU
// in bytes) with a default route to a namespace that plays the internet at
// 198.51.100.1. All of it goes with the test.
func Uplink(t testing.TB, mtuBytes string) *Namespace {
	t.Helper()
	internet := New(t)
	hostRun(t, "ip", "link", "add", UplinkName, "mtu", mtuBytes, "type", "veth", "peer", "name", "inet0", "mtu", mtuBytes, "netns", internet.Name)
	t.Cleanup(func() {
		if _, err := Try("ip", "link", "show", UplinkName); err == nil {
			hostRun(t, "ip", "link", "del", UplinkName)
		}
	})
	hostRun(t, "ip", "addr", "add", HostAddr+"/24", "dev", UplinkName)
	hostRun(t, "ip", "link", "set", UplinkName, "up")
	internet.Run(t, "ip", "addr", "add", InternetAddr+"/24", "dev", "inet0")
	internet.Run(t, "ip", "link", "set", "inet0", "up")
	hostRun(t, "ip", "route", "add", "default", "via", InternetAddr, "dev", UplinkName)
	return internet
}
