package pump

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"mknet/spec/endpoint"
)

func testConfig() LinkConfig {
	next := Token(bytes.Repeat([]byte{0xab}, TokenBytes))
	return LinkConfig{
		Link: "mkn0", Address: netip.MustParsePrefix("172.30.30.2/30"), Gateway: netip.MustParseAddr("172.30.30.1"), MTUBytes: 1400,
		DNS:     endpoint.DNS{Nameservers: []string{"169.254.169.254", "2001:db8::1"}, Domain: "example.org", Search: []string{"a.example.org"}, Options: []string{"ndots:2"}},
		VnetHdr: true, Offloads: 0x6f, Lanes: 2, Windows: []Window{{1 << 20, 4096}, {256 << 10, 4096}},
		Keepalive: Milliseconds(5 * time.Second), Sealed: true, NextToken: &next,
	}
}

func TestLinkConfigGolden(t *testing.T) {
	plain := testConfig()
	plain.DNS, plain.VnetHdr, plain.Offloads, plain.Lanes, plain.Windows = endpoint.DNS{}, false, 0, 1, plain.Windows[:1]
	plain.Sealed, plain.NextToken = false, nil
	for name, c := range map[string]LinkConfig{"linkconfig-full": testConfig(), "linkconfig-plain": plain} {
		b, err := EncodeLinkConfig(c)
		if err != nil {
			t.Fatal(err)
		}
		goldenSession(t, name, string(b)+"\n")
		got, err := DecodeLinkConfig(b)
		again, err2 := EncodeLinkConfig(got)
		if err != nil || err2 != nil || !bytes.Equal(again, b) {
			t.Errorf("%s: round trip gives %s, %v, %v", name, again, err, err2)
		}
	}
	for name, a := range map[string]Ack{
		"ack":         {VnetHdr: true, Offloads: 0x0f, Lanes: 1, Windows: []Window{{1 << 20, 4096}}},
		"ack-refused": {Refused: "link mkn0: <operation> not permitted"},
	} {
		b, err := EncodeAck(a)
		if err != nil {
			t.Fatal(err)
		}
		goldenSession(t, name, string(b)+"\n")
		if _, err := DecodeAck(b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestLinkConfigRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*LinkConfig)
	}{
		{"foreign link", func(c *LinkConfig) { c.Link = "eth0" }},
		{"link without a number", func(c *LinkConfig) { c.Link = "mkn" }},
		{"link with a leading zero", func(c *LinkConfig) { c.Link = "mkn01" }},
		{"link with a path", func(c *LinkConfig) { c.Link = "mkn0/../x" }},
		{"no address", func(c *LinkConfig) { c.Address = netip.Prefix{} }},
		{"IPv6", func(c *LinkConfig) { c.Address = netip.MustParsePrefix("2001:db8::2/126") }},
		{"default route as address", func(c *LinkConfig) { c.Address = netip.MustParsePrefix("172.30.30.2/0") }},
		{"loopback", func(c *LinkConfig) {
			c.Address, c.Gateway = netip.MustParsePrefix("127.0.0.2/30"), netip.MustParseAddr("127.0.0.1")
		}},
		{"gateway elsewhere", func(c *LinkConfig) { c.Gateway = netip.MustParseAddr("172.30.30.5") }},
		{"gateway is the address", func(c *LinkConfig) { c.Gateway = c.Address.Addr() }},
		{"mtu too small", func(c *LinkConfig) { c.MTUBytes = 575 }},
		{"mtu too large", func(c *LinkConfig) { c.MTUBytes = 65516 }},
		{"unknown offload", func(c *LinkConfig) { c.Offloads = 0x100 }},
		{"offload without the header", func(c *LinkConfig) { c.VnetHdr = false }},
		{"no lane", func(c *LinkConfig) { c.Lanes, c.Windows = 0, nil }},
		{"three lanes", func(c *LinkConfig) { c.Lanes, c.Windows = 3, make([]Window, 3) }},
		{"window missing", func(c *LinkConfig) { c.Windows = c.Windows[:1] }},
		{"window below two frames", func(c *LinkConfig) { c.Windows = []Window{{MinWindowBytes - 1, 16}, LatencyWindow} }},
		{"window below four messages", func(c *LinkConfig) { c.Windows = []Window{BulkWindow, {MinWindowBytes, MinWindowMessages - 1}} }},
		{"window above the most", func(c *LinkConfig) { c.Windows = []Window{{MaxWindowBytes + 1, 16}, LatencyWindow} }},
		{"window without messages", func(c *LinkConfig) { c.Windows = []Window{BulkWindow, {Bytes: 1 << 20}} }},
		{"no keepalive", func(c *LinkConfig) { c.Keepalive = 0 }},
		{"keepalive in microseconds", func(c *LinkConfig) { c.Keepalive += Milliseconds(time.Microsecond) }},
		{"nameserver is a name", func(c *LinkConfig) { c.DNS.Nameservers = []string{"dns"} }},
		{"search with a newline", func(c *LinkConfig) { c.DNS.Search = []string{"a\nnameserver 1.2.3.4"} }},
		{"option with a comment", func(c *LinkConfig) { c.DNS.Options = []string{"a;b"} }},
		{"empty search", func(c *LinkConfig) { c.DNS.Search = []string{""} }},
		{"long domain", func(c *LinkConfig) { c.DNS.Domain = strings.Repeat("a", 254) }},
		{"many nameservers", func(c *LinkConfig) { c.DNS.Nameservers = make([]string, 17) }},
		{"zero token", func(c *LinkConfig) { c.NextToken = &Token{} }},
		{"too long together", func(c *LinkConfig) {
			c.DNS.Search = slicesRepeat(strings.Repeat("s", 250), 16)
			c.DNS.Options = c.DNS.Search
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := testConfig()
			tt.edit(&c)
			if b, err := EncodeLinkConfig(c); !errors.Is(err, ErrMalformedConfig) {
				t.Errorf("got %s, %v; want ErrMalformedConfig", b, err)
			}
		})
	}
}

func slicesRepeat(s string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = s
	}
	return out
}

func TestDecodeLinkConfigRefuses(t *testing.T) {
	good, err := EncodeLinkConfig(testConfig())
	if err != nil {
		t.Fatal(err)
	}
	g := string(good)
	for _, tt := range []struct{ name, in string }{
		{"empty", ""},
		{"null", "null"},
		{"array", "[]"},
		{"unknown field", strings.Replace(g, `{"link"`, `{"x":1,"link"`, 1)},
		{"duplicate field", strings.Replace(g, `{"link"`, `{"link":"mkn0","link"`, 1)},
		{"other case", strings.Replace(g, `"mtu"`, `"MTU"`, 1)},
		{"white space", strings.Replace(g, `{"link"`, `{ "link"`, 1)},
		{"trailing bytes", g + "{}"},
		{"trailing newline", g + "\n"},
		{"other order", strings.Replace(g, `"link":"mkn0",`, ``, 1)[:len(g)-15] + `"link":"mkn0"}`},
		{"upper-case token", strings.Replace(g, "abab", "ABAB", 1)},
		{"negative keepalive", strings.Replace(g, `"keepaliveMs":5000`, `"keepaliveMs":-1`, 1)},
		{"oversized", strings.Repeat("x", MaxLinkConfigBytes+1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := DecodeLinkConfig([]byte(tt.in))
			if !errors.Is(err, ErrMalformedConfig) {
				t.Errorf("%s: got %v, want ErrMalformedConfig", tt.in, err)
			}
			if err != nil && strings.Contains(strings.ToLower(err.Error()), "abab") {
				t.Errorf("the error shows the token: %v", err)
			}
		})
	}
}

func TestAckRefuses(t *testing.T) {
	w := []Window{BulkWindow}
	for _, a := range []Ack{
		{},
		{Lanes: 1},
		{Lanes: 1, Windows: w, Offloads: 1},
		{Lanes: 1, Windows: []Window{{MinWindowBytes - 1, 16}}},
		{Lanes: 1, Windows: []Window{{MinWindowBytes, MinWindowMessages - 1}}},
		{Lanes: 1, Windows: w, Refused: "both"},
		{Refused: "line\nbreak"},
		{Refused: strings.Repeat("x", 257)},
	} {
		if _, err := EncodeAck(a); !errors.Is(err, ErrMalformedConfig) {
			t.Errorf("%+v: got %v, want ErrMalformedConfig", a, err)
		}
	}
	if got := Printable("a\nb\x00é"); got != "a?b???" {
		t.Errorf("Printable: got %q", got)
	}
}

func TestParseToken(t *testing.T) {
	raw := bytes.Repeat([]byte{7}, 32)
	hexed := []byte(strings.Repeat("07", 32))
	for _, tt := range []struct {
		name string
		in   []byte
		ok   bool
	}{
		{"raw", raw, true},
		{"hex", hexed, true},
		{"hex and newline", append(bytes.Clone(hexed), '\n'), true},
		{"empty", nil, false},
		{"newline", []byte("\n"), false},
		{"short", raw[:31], false},
		{"long", append(bytes.Clone(raw), 7), false},
		{"raw and newline", append(bytes.Clone(raw), '\n'), false},
		{"half hex", hexed[:62], false},
		{"not hex", []byte(strings.Repeat("zz", 32)), false},
		{"zero", make([]byte, 32), false},
	} {
		got, err := ParseToken(tt.in)
		if (err == nil) != tt.ok || tt.ok && got != Token(raw) {
			t.Errorf("%s: got %v, want ok %t", tt.name, err, tt.ok)
		}
	}
	if s := fmt.Sprintf("%v %+v %#v %s", Token(raw), Token(raw), Token(raw), Token(raw)); strings.Contains(s, "07") || strings.Contains(s, "7 7") {
		t.Errorf("a token prints as %s", s)
	}
	next := Token(raw)
	if s := fmt.Sprintf("%v %+v", LinkConfig{NextToken: &next}, LinkConfig{NextToken: &next}); strings.Contains(s, "07") {
		t.Errorf("a configuration prints its token: %s", s)
	}
}

func FuzzLinkConfig(f *testing.F) {
	good, err := EncodeLinkConfig(testConfig())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(bytes.Replace(good, []byte("mkn0"), []byte("mkn\\u0030"), 1))
	f.Add([]byte(`{"link":"mkn0","address":"10.0.0.2/30","gateway":"10.0.0.1","mtu":576}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeLinkConfig(b)
		if err != nil {
			return
		}
		again, err := EncodeLinkConfig(c)
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%s decodes as %+v and encodes as %s, %v", b, c, again, err)
		}
	})
}

func FuzzAck(f *testing.F) {
	f.Add([]byte(`{"vnetHdr":true,"offloads":15,"lanes":1,"windows":[{"bytes":1048576,"messages":16}]}`))
	f.Add([]byte(`{"vnetHdr":false,"offloads":0,"lanes":0,"windows":null,"refused":"no"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := DecodeAck(b)
		if err != nil {
			return
		}
		again, err := EncodeAck(a)
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%s decodes as %+v and encodes as %s, %v", b, a, again, err)
		}
	})
}
