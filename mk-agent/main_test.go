package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// built is the agent's static binary.
var built = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "mk-agent")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	build := exec.Command("go", "build", "-o", dir+"/mk-agent", ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build: %w\n%s", err, out)
	}
	return os.ReadFile(dir + "/mk-agent")
})

// initramfs is a root folder with nothing but the agent, /dev/net/tun and what is
// put there: no /proc, no /sys, no program, no library.
func initramfs(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	binary, err := built()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/mk-agent", binary, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(root+"/dev/net", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(root+"/dev/net/tun", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 200))); err != nil { // Documentation/admin-guide/devices.txt
		t.Fatal(err)
	}
	return root
}

// agentIn starts the agent with root as its root folder, in a child's namespace.
func agentIn(t *testing.T, child *netlab.Namespace, root string, args ...string) (stop func() (int, string)) {
	t.Helper()
	cmd := exec.Command("nsenter", append([]string{"--net=" + child.Path(), "--", "chroot", root, "/mk-agent", "run", "--listen", "unix:///s"}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() (int, string) {
		if !stopped {
			stopped = true
			_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
			_ = cmd.Wait()                          // its status is what is returned
		}
		return cmd.ProcessState.ExitCode(), out.String()
	}
	t.Cleanup(func() {
		if _, text := stop(); t.Failed() {
			t.Logf("agent:\n%s", text)
		}
	})
	return stop
}

func offer() pump.LinkConfig {
	return pump.LinkConfig{
		Link: "mkn0", Address: netip.MustParsePrefix("172.30.0.2/30"), Gateway: netip.MustParseAddr("172.30.0.1"), MTUBytes: 1400,
		DNS: endpoint.DNS{Nameservers: []string{"192.0.2.53"}}, Lanes: 1, Windows: []pump.Window{pump.BulkWindow}, Keepalive: pump.Milliseconds(5 * time.Second),
	}
}

// open dials until the agent listens.
func open(t *testing.T, root string, c session.Client) (s *session.Session, err error) {
	t.Helper()
	a, err := transport.Parse("unix://" + root + "/s")
	if err != nil {
		t.Fatal(err)
	}
	c.Dial = func(ctx context.Context) (net.Conn, error) { return transport.Dial(ctx, a) }
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		s, err = c.Open(t.Context(), offer())
		if !errors.Is(err, &transport.DialError{Kind: transport.Refused}) || time.Now().After(deadline) {
			return s, err
		}
	}
}

func TestAgentAloneInAnInitramfs(t *testing.T) {
	netlab.Clean(t)
	child, root := netlab.New(t), initramfs(t)
	token := session.NewToken()
	if err := session.CreateTokenFile(root+"/token", token); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/id", []byte(`{"sandboxID":"s","sandboxGeneration":"1"}`), 0o400); err != nil {
		t.Fatal(err)
	}
	stop := agentIn(t, child, root, "--identity", "/id", "--token", "/token")
	client := session.Client{Token: token, Identity: session.Identity{Sandbox: endpoint.Sandbox{ID: "s", Generation: "1"}, Endpoint: endpoint.NewGeneration()}}
	s, err := open(t, root, client)
	if err != nil {
		t.Fatal(err)
	}
	out := child.Run(t, "ip", "addr", "show", "mkn0") + child.Run(t, "ip", "route")
	for _, want := range []string{"172.30.0.2/30", "mtu 1400", "UP", "default via 172.30.0.1 dev mkn0"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
	if strings.Contains(out, "inet6") {
		t.Errorf("an IPv6 address without /proc:\n%s", out)
	}
	if b, err := os.ReadFile(root + "/etc/resolv.conf"); err != nil || !strings.Contains(string(b), "nameserver 192.0.2.53") {
		t.Errorf("resolver %q, %v", b, err)
	}
	// The identity is read again for every peer: a snapshot was restored.
	if err := errors.Join(os.Remove(root+"/id"), os.WriteFile(root+"/id", []byte(`{"sandboxID":"s","sandboxGeneration":"2"}`), 0o400)); err != nil {
		t.Fatal(err)
	}
	if _, err := open(t, root, client); !errors.Is(err, &pump.MismatchError{Field: pump.SandboxGeneration}) {
		t.Errorf("the old generation: got %v, want a mismatch", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if code, text := stop(); code != 0 || strings.Contains(text, hex.EncodeToString(token[:4])) {
		t.Errorf("exit code %d, want 0; output:\n%s", code, text)
	}
}

func TestAgentWithTheKernelCommandLine(t *testing.T) {
	netlab.Clean(t)
	child, root := netlab.New(t), initramfs(t)
	first, next := session.NewToken(), session.NewToken()
	line := "console=ttyS0 mknet.sandbox=s mknet.generation=1 mknet.token=" + hex.EncodeToString(first[:]) + "\n"
	if err := os.WriteFile(root+"/cmdline", []byte(line), 0o444); err != nil {
		t.Fatal(err)
	}
	stop := agentIn(t, child, root, "--cmdline", "/cmdline")
	client := session.Client{
		Token: first, NextToken: func() (pump.Token, error) { return next, nil },
		Identity: session.Identity{Sandbox: endpoint.Sandbox{ID: "s", Generation: "1"}, Endpoint: endpoint.NewGeneration()},
	}
	s, err := open(t, root, client)
	if err != nil || !s.Rotated {
		t.Fatalf("first session: %v", err)
	}
	_ = s.Close()
	for range 2 {
		if _, err := open(t, root, client); !errors.Is(err, session.ErrAuthentication) {
			t.Errorf("the token of the command line again: got %v, want ErrAuthentication", err)
		}
		client := client
		client.Token = next
		if s, err := open(t, root, client); err != nil || s.Rotated {
			t.Errorf("the next token: %v", err)
		} else if err := s.Close(); err != nil {
			t.Error(err)
		}
		code, text := stop()
		if code != 0 || strings.Contains(text, hex.EncodeToString(first[:4])) {
			t.Errorf("exit code %d, want 0 and no token in\n%s", code, text)
		}
		stop = agentIn(t, child, root, "--cmdline", "/cmdline")
	}
	stop()
}

func TestExitCodes(t *testing.T) {
	netlab.Clean(t)
	child, root := netlab.New(t), initramfs(t)
	if err := os.WriteFile(root+"/id", []byte(`{"sandboxID":"s","sandboxGeneration":"1"}`), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/token", make([]byte, 0), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	good := session.NewToken()
	if err := session.CreateTokenFile(root+"/good", good); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		args []string
		want int
		says string
	}{
		{"no such flag", []string{"--nonsense"}, exitUsage, "nonsense"},
		{"log level", []string{"--log-level", "x"}, exitUsage, "log-level"},
		{"scheme", []string{"--identity", "/id", "--token", "/good", "--listen", "tcp://x:1"}, exitUsage, "scheme"},
		{"no identity", []string{"--identity", "/none"}, exitIdentity, "no such file"},
		{"empty token", []string{"--identity", "/id", "--token", "/token"}, exitIdentity, "0 bytes"},
		{"no command line", nil, exitIdentity, "mount /proc"},
		{"cannot listen", []string{"--identity", "/id", "--token", "/good", "--listen", "unix:///file"}, exitListen, "is not a socket"},
	} {
		cmd := exec.Command("nsenter", append([]string{"--net=" + child.Path(), "--", "chroot", root, "/mk-agent", "run"}, tt.args...)...)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != tt.want || !strings.Contains(string(out), tt.says) {
			t.Errorf("%s: exit code %d (%v), want %d and %q; output:\n%s", tt.name, code, err, tt.want, tt.says, out)
		}
	}
}
