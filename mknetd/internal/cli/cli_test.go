package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/metrics"
	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

const patience = 60 * time.Second

// daemon is an engine of which only what the commands ask for is there.
type daemon struct {
	api.Engine
	endpoints []endpoint.Endpoint
	inventory specapi.Inventory
	events    []specapi.Event
	verdict   specapi.Outcome        // of Explain
	counters  *specapi.CountersReply // of the first endpoint

	mu     sync.Mutex
	closed int
	bound  specapi.BindRequest
	traced specapi.TraceRequest
	asked  specapi.WayRequest // of Explain
	ns     bool
}

func (d *daemon) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed++
	return nil
}

func (d *daemon) Get(_ context.Context, gen endpoint.Generation) (endpoint.Endpoint, error) {
	for _, ep := range d.endpoints {
		if ep.Generation == gen {
			return ep, nil
		}
	}
	return endpoint.Endpoint{}, specapi.Errorf(specapi.NotFound, "generation %s: no such endpoint", gen)
}

func (d *daemon) Counters(_ context.Context, gen endpoint.Generation) (specapi.CountersReply, error) {
	if len(d.endpoints) > 2 && gen == d.endpoints[2].Generation && d.endpoints[2].Mode == endpoint.Veth {
		return specapi.CountersReply{Generation: gen, Path: []specapi.PathCount{{Outcome: "peer", Packets: 5, Bytes: 490}, {Outcome: "stack"}}}, nil
	}
	if d.counters == nil || gen != d.endpoints[0].Generation {
		return specapi.CountersReply{}, specapi.Errorf(specapi.NotFound, "no counters yet")
	}
	return *d.counters, nil
}

func (d *daemon) List(_ context.Context, f api.Filter) ([]endpoint.Endpoint, error) {
	return slices.DeleteFunc(slices.Clone(d.endpoints), func(ep endpoint.Endpoint) bool { return !f.Match(ep) }), nil
}

func (d *daemon) Events(context.Context, specapi.EventsAfter) specapi.EventList {
	return specapi.EventList{Instance: "i", Lost: 3, Events: d.events}
}

func (d *daemon) Follow(ctx context.Context, after specapi.EventsAfter, send func(specapi.Event) error) error {
	for _, ev := range d.events {
		if ev.Seq > after.Seq {
			if err := send(ev); err != nil {
				return err
			}
		}
	}
	<-ctx.Done()
	return nil
}

func (d *daemon) Stats(context.Context) metrics.Stats { return metrics.Stats{} }

func (d *daemon) Health(context.Context) specapi.Health { return specapi.Health{Ready: true} }

func (d *daemon) Config(context.Context) specapi.DaemonConfig { return specapi.DaemonConfig{} }

func (d *daemon) Inventory(context.Context) (specapi.Inventory, error) { return d.inventory, nil }

func (d *daemon) Bind(_ context.Context, req specapi.BindRequest, ns *os.File, _ endpoint.Process) (specapi.BindReply, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bound, d.ns = req, ns != nil
	if ns != nil {
		_ = ns.Close()
	}
	ep := d.endpoints[0]
	ep.Binding = &endpoint.Binding{Sandbox: req.Sandbox}
	return specapi.BindReply{Endpoint: ep, Nonce: strings.Repeat("ab", 16)}, nil
}

// set changes the daemon between two calls.
func (d *daemon) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
}

func sample(gen string, state endpoint.State) endpoint.Endpoint {
	g, err := endpoint.ParseGeneration(gen)
	if err != nil {
		panic(err)
	}
	return endpoint.Endpoint{
		Generation: g, Attachment: endpoint.Attachment{Network: "n", ContainerID: "c" + gen[:2], IfName: "eth0"}, State: state, Mode: endpoint.Multikernel,
		Address: endpoint.DefaultPools.At(7).Child, HostLink: g.HostLink(), Chain: g.Chain(), CreatedAt: time.Unix(0, 0).UTC(), UpdatedAt: time.Unix(0, 0).UTC(),
	}
}

// run runs one command.
func run(t *testing.T, p Program, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	p.Version, p.Stdout, p.Stderr = "v1", &out, &errs
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	status = p.Run(ctx, args)
	return status, out.String(), errs.String()
}

// started is a daemon that serves until the test ends.
func started(t *testing.T, d *daemon) (flags []string) {
	t.Helper()
	dir := t.TempDir()
	notifications, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notifications.Close()
	t.Setenv("NOTIFY_SOCKET", filepath.Join(dir, "notify"))
	socket := filepath.Join(dir, "s")
	cfg := config.Config{Socket: socket, StateDir: dir}
	p := Program{Version: "v1", Start: func(context.Context, config.Config, *slog.Logger, time.Duration) (Daemon, error) { return d, nil }}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.serve(ctx, cfg, slog.New(slog.DiscardHandler), false) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
		if d.closed != 1 {
			t.Errorf("the engine was closed %d times", d.closed)
		}
	})
	if err := notifications.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 256)
	n, err := notifications.Read(buf)
	if err != nil || !strings.HasPrefix(string(buf[:n]), "READY=1\n") {
		t.Fatalf("service manager was told %q, %v", buf[:n], err)
	}
	return []string{"--config", write(t, ""), "--socket", socket}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestEndpoints(t *testing.T) {
	d := &daemon{endpoints: []endpoint.Endpoint{
		sample("aa112233445566778899aabbccddeeff", endpoint.Ready),
		sample("aa112233445566778899aabbccddee00", endpoint.Deleting),
		sample("bb112233445566778899aabbccddeeff", endpoint.Ready),
	}}
	d.counters = &specapi.CountersReply{Generation: d.endpoints[0].Generation, Counters: specapi.Counters{RxPackets: 7001, Drops: []specapi.Drops{{Reason: "source_address", Packets: 3}}}}
	d.endpoints[0].Degraded = []string{"route missing"}
	d.endpoints[2].Mode = endpoint.Veth
	flags := started(t, d)
	for _, c := range []struct {
		name   string
		args   []string
		status int
		want   []string // of stdout, or of stderr where the status is not 0
		lacks  string
	}{
		{"table", nil, ExitOK, []string{"GENERATION", "aa1122334455", "READY,degraded", "DELETING", "172.30.0.30", "cbb"}, ""},
		{"filter", []string{"--state", "DELETING"}, ExitOK, []string{"caa"}, "cbb"},
		{"json", []string{"-o", "json"}, ExitOK, []string{`"endpoints": [`}, ""},
		{"json of none", []string{"-o", "json", "--network", "other"}, ExitOK, []string{`"endpoints": []`}, ""},
		{"yaml", []string{"-o", "yaml"}, ExitOK, []string{"- address: 172.30.0.30"}, ""},
		{"one", []string{"bb112233445566778899aabbccddeeff"}, ExitOK, []string{"mkvbb112233445", "MK-bb1122334455"}, "child"},
		{"a pod with its counters", []string{"bb112233445566778899aabbccddeeff"}, ExitOK, []string{"peer", "5 packets, 490 bytes"}, "stack"},
		{"one with counters", []string{"aa112233445566778899aabbccddeeff"}, ExitOK, []string{"7001 packets", "source_address: 3"}, ""},
		{"its counters as JSON", []string{"aa112233445566778899aabbccddeeff", "-o", "json"}, ExitOK, []string{`"rxPackets": 7001`, `"generation": "aa112233445566778899aabbccddeeff"`}, ""},
		{"one, shortened", []string{"b"}, ExitOK, []string{"bb112233445566778899aabbccddeeff"}, ""},
		{"one as JSON", []string{"bb1122334455", "-o", "json"}, ExitOK, []string{`"generation": "bb112233445566778899aabbccddeeff"`}, "endpoints"},
		{"ambiguous", []string{"aa"}, ExitUsage, []string{"names 2 endpoints", "aa112233445566778899aabbccddee00"}, ""},
		{"absent", []string{"cc"}, ExitRefused, []string{"no such endpoint"}, ""},
		{"absent, whole", []string{"cc112233445566778899aabbccddeeff"}, ExitRefused, []string{"NOT_FOUND"}, ""},
		{"no generation", []string{"xyz"}, ExitUsage, []string{"hexadecimal"}, ""},
		{"two", []string{"a", "b"}, ExitUsage, []string{"accepts at most 1"}, ""},
		{"unknown form", []string{"-o", "xml"}, ExitUsage, []string{"table, json or yaml"}, ""},
		{"unknown state", []string{"--state", "GONE"}, ExitRefused, []string{"GONE"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, out, errs := run(t, Program{}, append(append([]string{"endpoints"}, flags...), c.args...)...)
			text := out
			if c.status != ExitOK {
				text = errs
			}
			if status != c.status {
				t.Fatalf("status %d, want %d: %s%s", status, c.status, out, errs)
			}
			for _, w := range c.want {
				if !strings.Contains(text, w) {
					t.Errorf("%q is missing in\n%s", w, text)
				}
			}
			if c.lacks != "" && strings.Contains(text, c.lacks) {
				t.Errorf("%q is in\n%s", c.lacks, text)
			}
		})
	}
}

func TestInventory(t *testing.T) {
	gen := sample("aa112233445566778899aabbccddeeff", endpoint.Ready).Generation
	item := func(s specapi.InventoryStatus) specapi.InventoryItem {
		return specapi.InventoryItem{Kind: "veth", Object: "mkv0", Where: endpoint.InHost, Generation: gen, Status: s, Problem: "why", Inspect: "ip link"}
	}
	for _, c := range []struct {
		status specapi.InventoryStatus
		want   int
	}{{specapi.Recorded, 0}, {specapi.Shared, 0}, {specapi.Orphan, 1}, {specapi.Missing, 1}, {specapi.Altered, 1}} {
		t.Run(string(c.status), func(t *testing.T) {
			flags := started(t, &daemon{inventory: specapi.Inventory{Items: []specapi.InventoryItem{item(specapi.Recorded), item(c.status)}}})
			for _, form := range []string{"table", "json", "yaml"} {
				status, out, errs := run(t, Program{}, append([]string{"inventory", "-o", form}, flags...)...)
				if status != c.want || !strings.Contains(out, string(c.status)) || errs != "" {
					t.Errorf("%s: status %d, want %d: %s%s", form, status, c.want, out, errs)
				}
			}
		})
	}
}

func TestBind(t *testing.T) {
	d := &daemon{endpoints: []endpoint.Endpoint{sample("aa112233445566778899aabbccddeeff", endpoint.Ready)}}
	flags := started(t, d)
	sandbox := []string{"bind", "--sandbox", "s", "--sandbox-generation", "1"}
	for _, c := range []struct {
		name   string
		args   []string
		status int
		want   specapi.Selector
		ns     bool
	}{
		{"by generation", []string{"--generation", "aa1"}, ExitOK, specapi.Selector{Generation: d.endpoints[0].Generation}, false},
		{"by attachment", []string{"--network", "n", "--container-id", "c", "--if-name", "eth0"}, ExitOK, specapi.Selector{Attachment: endpoint.Attachment{Network: "n", ContainerID: "c", IfName: "eth0"}}, false},
		{"by namespace", []string{"--netns", "/proc/self/ns/net"}, ExitOK, specapi.Selector{NetnsPath: "/proc/self/ns/net"}, true},
		{"by nothing", nil, ExitRefused, specapi.Selector{}, false},
		{"by a namespace that is not there", []string{"--netns", "/nowhere"}, ExitUsage, specapi.Selector{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d.set(func() { d.bound = specapi.BindRequest{} })
			status, out, errs := run(t, Program{}, slices.Concat(sandbox, flags, c.args)...)
			if status != c.status {
				t.Fatalf("status %d, want %d: %s%s", status, c.status, out, errs)
			}
			if status != ExitOK {
				return
			}
			var rep specapi.BindReply
			if err := json.Unmarshal([]byte(out), &rep); err != nil || len(rep.Nonce) != 32 {
				t.Errorf("printed %s (%v)", out, err)
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.bound.Selector != c.want || d.ns != c.ns {
				t.Errorf("the engine got %+v, descriptor %v", d.bound, d.ns)
			}
		})
	}
	if status, _, errs := run(t, Program{}, append([]string{"bind", "--generation", "aa1"}, flags...)...); status != ExitUsage || !strings.Contains(errs, "sandbox") {
		t.Errorf("without a sandbox: %d %s", status, errs)
	}
}

func TestStatusOfFailures(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	cfg := write(t, "mtu: 1400")
	for _, c := range []struct {
		name   string
		args   []string
		status int
		want   string
	}{
		{"no daemon", []string{"endpoints", "--config", cfg, "--socket", none}, ExitUnreachable, "is mknetd running"},
		{"no command", []string{"frobnicate"}, ExitUsage, "unknown command"},
		{"no subcommand", []string{"config", "frobnicate"}, ExitUsage, "unknown command"},
		{"nothing", nil, ExitUsage, "a command is needed"},
		{"unknown flag", []string{"inventory", "--frobnicate"}, ExitUsage, "unknown flag"},
		{"bad configuration", []string{"endpoints", "--config", write(t, "sockett: /x")}, ExitUsage, "did you mean socket"},
		{"missing configuration", []string{"serve", "--config", none}, ExitUsage, "no such file"},
		{"bad flag value", []string{"config", "check", "--config", cfg, "--child-pool", "8.8.8.0/24"}, ExitUsage, "private"},
		{"unknown group", []string{"serve", "--config", cfg, "--socket-group", "no-such-group-here"}, ExitDiffers, "socketGroup"},
		{"no certificate", []string{"serve", "--config", cfg, "--tcp-address", "h:1", "--tcp-certificate", "/no", "--tcp-key", "/no", "--tcp-client-ca", "/no"}, ExitDiffers, "tcp certificate"},
		{"engine that does not start", []string{"serve", "--config", cfg, "--socket", none}, ExitDiffers, "pool overlaps"},
		{"purge without yes", []string{"purge", "--config", cfg}, ExitUsage, "--yes"},
		{"purge that fails", []string{"purge", "--config", cfg, "--yes"}, ExitDiffers, "busy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := Program{
				Start: func(context.Context, config.Config, *slog.Logger, time.Duration) (Daemon, error) {
					return nil, errors.New("pool overlaps")
				},
				Purge: func(context.Context, config.Config, *slog.Logger, func(string)) error { return errors.New("busy") },
			}
			status, out, errs := run(t, p, c.args...)
			if status != c.status || !strings.Contains(errs, c.want) || !strings.HasPrefix(errs, "mknetd: ") {
				t.Errorf("status %d, want %d: %q %q, want %q", status, c.status, out, errs, c.want)
			}
		})
	}
}

func TestGoodCommands(t *testing.T) {
	p := Program{Purge: func(_ context.Context, _ config.Config, _ *slog.Logger, say func(string)) error {
		say("endpoint x")
		return nil
	}}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"version"}, "mknetd v1\n"},
		{[]string{"config", "check", "--config", write(t, "mtu: 1400"), "--log-level", "debug"}, "is valid"},
		{[]string{"purge", "--yes", "--config", write(t, "")}, "removed endpoint x"},
		{[]string{"--help"}, "Exit status:"},
		{[]string{"inventory", "--help"}, "Exit status:"},
		{[]string{"serve", "--help"}, "--connection-limit"},
	} {
		if status, out, errs := run(t, p, c.args...); status != ExitOK || !strings.Contains(out, c.want) {
			t.Errorf("%v: status %d: %s%s", c.args, status, out, errs)
		}
	}
}

// The engine comes before the socket: a daemon that may not run must not touch the
// socket of the one that does.
func TestSecondDaemonLeavesTheSocket(t *testing.T) {
	flags := started(t, &daemon{})
	before, err := os.Lstat(flags[3])
	if err != nil {
		t.Fatal(err)
	}
	for name, start := range map[string]func(context.Context, config.Config, *slog.Logger, time.Duration) (Daemon, error){
		"refused by the store": func(context.Context, config.Config, *slog.Logger, time.Duration) (Daemon, error) {
			return nil, errors.New("in use")
		},
		"refused by the socket": func(context.Context, config.Config, *slog.Logger, time.Duration) (Daemon, error) {
			return &daemon{}, nil
		},
	} {
		status, _, errs := run(t, Program{Start: start}, append([]string{"serve"}, flags...)...)
		if status != ExitDiffers {
			t.Errorf("%s: status %d: %s", name, status, errs)
		}
	}
	if after, err := os.Lstat(flags[3]); err != nil || !os.SameFile(before, after) {
		t.Errorf("the socket of the first is gone: %v", err)
	}
}

func TestNotify(t *testing.T) {
	for _, c := range []struct {
		value string
		ok    bool
	}{{"", true}, {"relative", false}, {"/nowhere/notify", false}} {
		t.Setenv("NOTIFY_SOCKET", c.value)
		if err := notify("READY=1"); (err == nil) != c.ok {
			t.Errorf("%q: %v", c.value, err)
		}
	}
	name := "@mknet-test-" + filepath.Base(t.TempDir()) + filepath.Base(filepath.Dir(t.TempDir()))
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", name)
	if err := notify("STOPPING=1"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	if err := l.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if n, err := l.Read(buf); err != nil || string(buf[:n]) != "STOPPING=1" {
		t.Errorf("got %q, %v", buf[:n], err)
	}
}
