package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/shim/internal/binding"
	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/pump"
)

func TestExitCode(t *testing.T) {
	dial := func(k transport.Kind) error { return &transport.DialError{Kind: k, Err: errors.New("x")} }
	mismatch := func(f pump.Field) error { return &pump.MismatchError{Field: f} }
	for _, tt := range []struct {
		err  error
		want int
	}{
		{errors.New("x"), 1},
		{&usageError{errors.New("x")}, 2},
		{&transport.AddressError{}, 2},
		{&client.UnreachableError{Err: fs.ErrNotExist}, 3},
		{api.Errorf(api.NotFound, "x"), 3},
		{&binding.MismatchError{}, 3},
		{api.Errorf(api.StaleGeneration, "x"), 4},
		{dial(transport.NoDevice), 5},
		{dial(transport.Refused), 6},
		{session.ErrClosed, 6},
		{dial(transport.TimedOut), 7},
		{session.ErrTimeout, 7},
		{&data.DeadPeerError{}, 7},
		{session.ErrAuthentication, 8},
		{mismatch(pump.Version), 9},
		{mismatch(pump.Sandbox), 10},
		{mismatch(pump.SandboxGeneration), 11},
		{mismatch(pump.EndpointGeneration), 12},
		{binding.ErrGone, 13},
		{&data.PeerClosedError{Reason: pump.Displaced}, 13},
		{&data.PeerClosedError{Reason: pump.Shutdown}, 1},
		{dial(transport.Unsupported), 14},
		{&session.TokenFileError{}, 15},
		{fmt.Errorf("%w: %w", errTokenFile, fs.ErrNotExist), 15},
		{session.ErrNextToken, 15},
		{&session.RefusedError{}, 16},
		{dial(transport.Denied), 1},
	} {
		if got := exitCode(&failure{fmt.Errorf("agent not reached: %w", tt.err)}); got != tt.want {
			t.Errorf("%v: exit code %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestFlags(t *testing.T) {
	dir := t.TempDir()
	token, nonce := filepath.Join(dir, "token"), filepath.Join(dir, "nonce")
	if err := session.CreateTokenFile(token, session.NewToken()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(nonce, []byte(strings.Repeat("0a", 16)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	gen := strings.Repeat("ab", 16)
	for _, tt := range []struct {
		name string
		edit func(*options)
		want int // 0: accepted
	}{
		{"endpoint", func(*options) {}, 0},
		{"attachment", func(o *options) { o.endpoint, o.network, o.containerID, o.ifName = "", "n", "c", "eth0" }, 0},
		{"namespace", func(o *options) { o.endpoint, o.netns = "", "/run/netns/x" }, 0},
		{"bound", func(o *options) { o.bound, o.nonceFile = true, nonce }, 0},
		{"no endpoint", func(o *options) { o.endpoint = "" }, 2},
		{"two ways", func(o *options) { o.netns = "/x" }, 2},
		{"half an attachment", func(o *options) { o.endpoint, o.network = "", "n" }, 2},
		{"bad generation", func(o *options) { o.endpoint = "AB" }, 2},
		{"bad sandbox", func(o *options) { o.sandbox.ID = "a b" }, 2},
		{"bad agent", func(o *options) { o.agent = "tcp://x:1" }, 2},
		{"lanes", func(o *options) { o.lanes = 3 }, 2},
		{"keepalive", func(o *options) { o.keepalive = 1 }, 2},
		{"priority", func(o *options) { o.priority = 20 }, 2},
		{"bound without nonce", func(o *options) { o.bound = true }, 2},
		{"nonce without bound", func(o *options) { o.nonceFile = nonce }, 2},
		{"bad nonce", func(o *options) { o.bound, o.nonceFile = true, token }, 3},
		{"no token", func(o *options) { o.token = dir + "/none" }, 15},
		{"token for all", func(o *options) { o.token = filepath.Join(dir, "open") }, 15},
		{"socket", func(o *options) { o.socket = "relative" }, 2},
		{"log level", func(o *options) { o.logLevel = "loud" }, 2},
	} {
		if err := os.WriteFile(filepath.Join(dir, "open"), make([]byte, 32), 0o644); err != nil {
			t.Fatal(err)
		}
		o := options{socket: "/run/x.sock", endpoint: gen, agent: "unix:///run/a", token: token, lanes: 2, keepalive: 5e9, logLevel: "info"}
		o.sandbox.ID, o.sandbox.Generation = "s", "1"
		tt.edit(&o)
		_, err := o.carrierConfig()
		got := 0
		if err != nil {
			got = exitCode(err)
		}
		if got != tt.want {
			t.Errorf("%s: exit code %d (%v), want %d", tt.name, got, err, tt.want)
		}
	}
}
