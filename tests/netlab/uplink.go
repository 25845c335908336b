package netlab

import (
	"strconv"
	"testing"
)

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
	mtu, err := strconv.Atoi(mtuBytes)
	if err != nil {
		t.Fatalf("MTU of the uplink: %v", err)
	}
	internet := New(t)
	Veth(t, End{Link: UplinkName, Addr: HostAddr + "/24", MTUBytes: mtu}, End{NS: internet, Link: "inet0", Addr: InternetAddr + "/24", MTUBytes: mtu})
	var host *Namespace
	host.AddRoute(t, Route{To: "0.0.0.0/0", Via: InternetAddr, Link: UplinkName})
	return internet
}
