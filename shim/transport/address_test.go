package transport

import (
	"errors"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want Address
	}{
		{"vsock://3:1021", Address{scheme: "vsock", cid: 3, port: 1021}},
		{"vsock://any:1021", Address{scheme: "vsock", cid: anyCID, port: 1021}},
		{"vsock://0:1021?transport=multikernel", Address{scheme: "vsock", cid: 0, port: 1021, multikernel: true}},
		{"hvsock:///run/fc.sock:52", Address{scheme: "hvsock", path: "/run/fc.sock", port: 52}},
		{"hvsock:///run/a:b:52", Address{scheme: "hvsock", path: "/run/a:b", port: 52}},
		{"unix:///run/mk-agent.sock", Address{scheme: "unix", path: "/run/mk-agent.sock"}},
	} {
		got, err := Parse(tt.in)
		if err != nil || got != tt.want || got.String() != tt.in {
			t.Errorf("Parse(%q): got %+v (%s), %v; want %+v", tt.in, got, got, err, tt.want)
		}
	}
	for _, in := range []string{
		"", "3:1021", "tcp://1.2.3.4:5", "vsock://3", "vsock://:1021", "vsock://x:1021", "vsock://3:0", "vsock://3:4294967295", "vsock://4294967296:1",
		"vsock://-1:1", "vsock://3:1/path", "vsock://u@3:1", "vsock://3:1#f", "vsock://3:1?transport=virtio", "vsock://3:1?x=y",
		"vsock://3:1?transport=multikernel&transport=multikernel", "hvsock:///run/fc.sock", "hvsock://host/run/fc.sock:1", "hvsock:///run/x:1?transport=multikernel",
		"unix://run/x", "unix:run/x", "unix:///", "unix:///" + strings.Repeat("x", 108), "unix:///a%00b", "vsock:3:1",
	} {
		var bad *AddressError
		if a, err := Parse(in); !errors.As(err, &bad) {
			t.Errorf("Parse(%q): got %+v, %v; want an *AddressError", in, a, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"vsock://3:1021", "vsock://any:1?transport=multikernel", "hvsock:///a:1", "unix:///a%20b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := Parse(s)
		if err != nil {
			return
		}
		if again, err := Parse(a.String()); err != nil || again != a {
			t.Fatalf("%q is %+v, its String %q is %+v, %v", s, a, a, again, err)
		}
	})
}
