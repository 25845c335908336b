package pump

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// returnLimit is how soon a link carries packets again after its peer is back.
// The promise is a second; a machine that runs ten other things needs more, so
// that the tests log what they measure and fail at this.
const returnLimit = 10 * time.Second

// The link carries packets again soon after its agent is back, and again after
// its shim is; the device in the child stays, and no counter goes down.
func TestAgentAndShimRestart(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	book := watchCounters(t, n, ep)
	before := linkIndex(t, child.Namespace)
	for round := range 3 {
		child.KillAgent()
		netlab.MustNotPing(t, child.Namespace, netlab.InternetAddr)
		flood := netlab.StartPings(t, child.Namespace)
		back := time.Now()
		child.StartAgent(t)
		first := flood.FirstAnswer(t, node.Patience)
		took := first.Sub(back)
		t.Logf("round %d: packets %s after mk-agent was started", round, took.Round(time.Millisecond))
		if took > returnLimit {
			t.Errorf("round %d: the link carried packets %s after the agent's return", round, took)
		}
		flood.Stop()
	}
	for round := range 3 {
		child.KillShim()
		flood := netlab.StartPings(t, child.Namespace)
		back := time.Now()
		child.StartShim(t)
		took := flood.FirstAnswer(t, node.Patience).Sub(back)
		t.Logf("round %d: packets %s after mk-shim was started", round, took.Round(time.Millisecond))
		if took > returnLimit {
			t.Errorf("round %d: the link carried packets %s after the shim's return", round, took)
		}
		flood.Stop()
	}
	if after := linkIndex(t, child.Namespace); after != before {
		t.Errorf("mkn0 was made again: index %s, was %s", after, before)
	}
	if err := child.StopShim(); err != nil { // which tells the last figures
		t.Errorf("mk-shim's orderly end: %v", err)
	}
	end := counters(t, n, ep)
	if below := end.Below(book.stop(t)); below != "" || end.Sessions < 4 || end.RxPackets == 0 {
		t.Errorf("mknetd has %+v at the end, want the sum of all shims (%s)", end, below)
	}
}

// mknetd carries no packets: killed and started again it costs none, the shim
// goes on, reports to the new one, and can still leave in order.
func TestDaemonRestartLosesNoPacket(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	waitCounters(t, n, ep, api.Counters{})
	before := counters(t, n, ep)
	if shown := netlab.Run(t, n.Daemon, "endpoints", "--config", n.Config, ep.Generation.String()); !strings.Contains(shown, "from child") {
		t.Errorf("mknetd endpoints shows no counters:\n%s", shown)
	}
	forged := api.CountersReport{Sandbox: child.Sandbox, Counters: before.Plus(before)} // by a process that is no shim
	if err := n.Client(t).ReportCounters(t.Context(), ep.Generation, forged); api.CodeOf(err) != api.StaleGeneration {
		t.Errorf("a report from another process: got %v, want STALE_GENERATION", err)
	}
	pings := netlab.StartPings(t, child.Namespace)
	pings.FirstAnswer(t, node.Patience)
	n.Kill(t)
	time.Sleep(200 * time.Millisecond) // traffic while no daemon runs is what is tested
	n.Start(t)
	waitCounters(t, n, ep, before)
	answered, lost := pings.Stop()
	t.Logf("%d echo requests answered, %d not", answered, lost)
	if lost > 0 || answered < 10 {
		t.Errorf("%d echo requests were lost and %d answered while mknetd restarted", lost, answered)
	}
	if err := child.StopShim(); err != nil {
		t.Errorf("mk-shim's orderly end: %v", err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
	if _, err := n.Client(t).Counters(t.Context(), ep.Generation); api.CodeOf(err) != api.NotFound {
		t.Errorf("counters of a deleted endpoint: got %v, want NOT_FOUND", err)
	}
}

// A restored snapshot or a clone is the same running child at another endpoint:
// the next session carries another address, gateway, MTU and resolver, and the
// agent applies them to the same device.
func TestNextSessionReconfigures(t *testing.T) {
	n := node.New(t)
	pods := []*netlab.Namespace{netlab.New(t), netlab.New(t)}
	first := n.Add(t, "c1", pods[0], "eth0")
	second := n.AddCall(t, node.Call{
		ContainerID: "c2", Netns: pods[1].Path(), IfName: "eth0",
		Config: map[string]any{"mtu": 1300, "dns": map[string]any{"nameservers": []string{"192.0.2.53"}, "search": []string{"clone.example"}}},
	})
	child := n.Boot(t, first, "g1")
	index := linkIndex(t, child.Namespace)
	child.KillShim() // the snapshot: its shim did not say goodbye

	// The restored child learns that it is another endpoint's: its identity file
	// is read for every peer.
	child.Endpoint = second
	child.SetIdentity(t, second.Generation)
	child.StartShim(t)
	child.WaitLink(t)
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	addr := child.Run(t, "ip", "-4", "addr", "show", "mkn0")
	if !strings.Contains(addr, second.Address.String()+"/30") || strings.Contains(addr, first.Address.String()+"/") || !strings.Contains(addr, "mtu 1300") {
		t.Errorf("mkn0 is not as the second endpoint has it:\n%s", addr)
	}
	if route := child.Run(t, "ip", "route"); !strings.Contains(route, "default via "+second.Gateway.String()) || strings.Contains(route, first.Gateway.String()) {
		t.Errorf("routes are not those of the second endpoint:\n%s", route)
	}
	resolv, err := os.ReadFile(child.ResolvConf)
	if err != nil || !strings.Contains(string(resolv), "192.0.2.53") || !strings.Contains(string(resolv), "clone.example") {
		t.Errorf("resolv.conf: %v\n%s", err, resolv)
	}
	if after := linkIndex(t, child.Namespace); after != index {
		t.Errorf("mkn0 was made again: index %s, was %s", after, index)
	}
	// The address that the child had before is no longer its own.
	netlab.MustNotPing(t, child.Namespace, netlab.InternetAddr, "-I", first.Address.String())
}

// A child that is not the one that the shim was told moves no packet, and the
// exit code says what differs.
func TestWrongPeerMovesNoPacket(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.BootAlone(t, ep, "g1")
	otherToken := n.Dir + "/other-token"
	netlab.Run(t, n.Shim, "token", otherToken)
	empty, short := n.Dir+"/empty-token", n.Dir+"/short-token"
	for path, text := range map[string]string{empty: "", short: "0123456789abcdef"} {
		if err := os.WriteFile(path, []byte(text), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name, flag, value string
		want              int
		text              string
	}{
		{"token", "--token", otherToken, 8, "authentication"},
		{"empty token", "--token", empty, 15, "token"},
		{"short token", "--token", short, 15, "token"},
		{"sandbox generation", "--sandbox-generation", "g2", 11, "generation"},
		{"sandbox", "--sandbox-id", "another", 10, "sandbox"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			args := append([]string(nil), child.ShimArgs()...)
			args[slices.Index(args, tt.flag)+1] = tt.value
			code, out := runShim(t, n, args...)
			if code != tt.want || !strings.Contains(out, tt.text) {
				t.Errorf("exit code %d, want %d with %q:\n%s", code, tt.want, tt.text, out)
			}
			if links := child.Run(t, "ip", "-br", "link"); strings.Contains(links, "mkn0") {
				t.Errorf("the child was configured:\n%s", links)
			}
			netlab.MustNotPing(t, child.Namespace, ep.Gateway.String())
			unbind(t, n, ep)
		})
	}
	t.Run("version", func(t *testing.T) {
		args := append([]string(nil), child.ShimArgs()...)
		args[slices.Index(args, "--agent")+1] = "unix://" + oldAgent(t, n, child)
		if code, out := runShim(t, n, args...); code != 9 || !strings.Contains(out, "version") {
			t.Errorf("exit code %d, want 9:\n%s", code, out)
		}
		unbind(t, n, ep)
	})
	t.Run("endpoint generation", func(t *testing.T) {
		child.SetIdentity(t, endpoint.NewGeneration())
		if code, out := runShim(t, n, child.ShimArgs()...); code != 12 || !strings.Contains(out, "endpoint generation") {
			t.Errorf("exit code %d, want 12:\n%s", code, out)
		}
		netlab.MustNotPing(t, child.Namespace, ep.Gateway.String())
		unbind(t, n, ep)
		child.SetIdentity(t, ep.Generation)
	})
	// After all of them the right shim still works.
	child.StartShim(t)
	child.WaitLink(t)
}

// A sealed link carries what a plain one does, and both ends say that it is sealed.
func TestSealedLink(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.BootAlone(t, ep, "g1")
	child.StartShim(t, "--sealed")
	child.WaitLink(t)
	if s := shimStats(t, n, ep); !s.Sealed {
		t.Errorf("mk-shim stats: %+v, want it sealed", s)
	}
	stream := startStream(t, n.Internet, child.Namespace)
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr, "-M", "do", "-s", "1372")
	child.KillAgent()
	child.StartAgent(t)
	child.WaitLink(t)
	stream.finish(t)
	noBadChecksums(t, n.Internet, child.Namespace)
}

// A shim ends with its runtime, in order.
func TestShimEndsWithItsRuntime(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.BootAlone(t, ep, "g1")
	t.Run("runtime-pid", func(t *testing.T) {
		runtime := exec.Command("sleep", "600")
		runtime.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := runtime.Start(); err != nil {
			t.Fatal(err)
		}
		ended := startShim(t, n, append(child.ShimArgs(), "--runtime-pid", strconv.Itoa(runtime.Process.Pid))...)
		child.WaitLink(t)
		if err := runtime.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = runtime.Wait() // killed
		if err := ended(t); err != nil {
			t.Errorf("mk-shim: %v", err)
		}
		if got := n.Endpoint(t, ep.Generation); got == nil || got.Binding != nil {
			t.Errorf("the endpoint is still bound: %+v", got)
		}
	})
	t.Run("parent-death", func(t *testing.T) {
		// The shell starts the shim and waits for it; killed, it leaves it behind.
		pidFile := n.Dir + "/shim.pid"
		script := fmt.Sprintf(`%s "$@" & echo $! > %s.new && mv %s.new %s; wait`, n.Shim, pidFile, pidFile, pidFile)
		runtime := exec.Command("sh", append([]string{"-c", script, "sh"}, append(child.ShimArgs(), "--parent-death")...)...)
		runtime.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := runtime.Start(); err != nil {
			t.Fatal(err)
		}
		child.WaitLink(t)
		if err := runtime.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = runtime.Wait() // killed
		netlab.Eventually(t, node.Patience, func() error {
			if got := n.Endpoint(t, ep.Generation); got == nil || got.Binding != nil {
				return errors.New("the endpoint is still bound")
			}
			return nil
		})
	})
}

// A TUN that is down loses packets and no session. One that is gone ends all its
// queues: the shim closes them, BINDs and ATTACHes again, to a TUN made anew.
func TestShimAttachesAgainWhenItsTunIsGone(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	book := watchCounters(t, n, ep)
	sessions := shimStats(t, n, ep).Counters.Sessions
	pod.Run(t, "ip", "link", "set", "eth0", "down")
	netlab.MustNotPing(t, child.Namespace, ep.Gateway.String())
	pod.Run(t, "ip", "link", "set", "eth0", "up")
	if after := shimStats(t, n, ep).Counters.Sessions; after != sessions {
		t.Errorf("%d sessions after the link was down, had %d", after, sessions)
	}
	pid := child.ShimPID()
	pod.Run(t, "ip", "link", "del", "eth0")
	netlab.Eventually(t, node.Patience, func() error {
		_, err := child.Try("ping", "-c1", "-W1", netlab.InternetAddr)
		return err
	})
	if now := n.Endpoint(t, ep.Generation); now == nil || now.Binding == nil || now.Binding.Shim == nil || now.Binding.Shim.PID != pid {
		t.Errorf("the endpoint's shim is %+v, want still process %d", now, pid)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	book.stop(t)
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
}

// oldAgent listens where an agent would and speaks a later version of the
// protocol only. It returns the socket.
func oldAgent(t *testing.T, n *node.Node, c *node.Child) string {
	t.Helper()
	path := n.Dir + "/later-version.sock"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	hello, err := pump.Hello{
		MinVersion: pump.MaxVersion + 1, MaxVersion: pump.MaxVersion + 2, Role: pump.RoleAgent, Endpoint: c.Endpoint.Generation, Sandbox: c.Sandbox,
	}.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write(hello) // a shim that has gone is what the test asks about
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return path
}
