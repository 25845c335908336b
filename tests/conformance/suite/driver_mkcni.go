package suite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// Time that mknetd gets to begin and to end on a busy machine.
const (
	daemonStart = 60 * time.Second
	daemonStop  = 30 * time.Second
	kernelGone  = 30 * time.Second // a namespace with its links, after it was removed
)

// mkcni drives mk-cni with a mknetd of its own in the private host: in multikernel
// mode, or in veth mode, see driver_mkpods.go.
type mkcni struct {
	pods bool // veth mode
	base
	daemon string // path of mknetd
	dir    string // configuration, store and logs
	cmd    *exec.Cmd
	exited chan struct{} // closed when mknetd has ended
	pool   string
}

// The pools: the default of mknetd is larger than the suite needs.
const (
	usualPool = "172.30.0.0/20"
	smallPool = "172.29.0.0/30" // one endpoint
)

// NewMkCNI drives this project's plugin and daemon.
func NewMkCNI(plugin, daemon string) Driver {
	return &mkcni{base: base{name: "mk-cni", plugin: plugin}, daemon: daemon, pool: usualPool}
}

func (m *mkcni) Conf() Conf {
	c := Conf{"type": "mk-cni", "socket": m.socket(), "cacheDir": filepath.Join(m.dir, "cache")}
	if m.pods {
		c["mode"] = "veth"
	}
	return c
}

func (m *mkcni) socket() string { return filepath.Join(m.dir, "mknetd.sock") }

func (m *mkcni) Start() error {
	if m.dir == "" {
		dir, err := os.MkdirTemp("/run", "conformance-mknet-")
		if err != nil {
			return err
		}
		m.dir = dir
	}
	if err := m.begin(); err != nil {
		return err
	}
	return prime(m)
}

func (m *mkcni) Settle() time.Duration { return kernelGone }

// Unlisted names mkhostN, the inner end of the veth that the TUN's packets leave
// by (spec/cni-result.md): podman's network reload takes the MAC of any interface
// in the sandbox for that of the workload and asks for it again.
func (m *mkcni) Unlisted(link string) bool { return strings.HasPrefix(link, endpoint.PeerLinkPrefix) }

// begin starts mknetd and waits until it answers.
func (m *mkcni) begin() error {
	conf := filepath.Join(m.dir, "mknetd.yaml")
	text := fmt.Sprintf("socket: %s\nstateDir: %s\nquarantine: 0s\nauditInterval: 0s\n", m.socket(), filepath.Join(m.dir, "state"))
	if m.pods {
		text += fmt.Sprintf("pools: [{name: pods, prefix: %s}]\n", m.pool)
	} else {
		text += fmt.Sprintf("childPool: %s\n", m.pool)
	}
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(m.dir, "mknetd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	m.cmd = exec.Command(m.daemon, "serve", "--config", conf)
	m.cmd.Stdout, m.cmd.Stderr = log, log
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.cmd.Start(); err != nil {
		return fmt.Errorf("start mknetd: %w", err)
	}
	m.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		defer close(exited)
		_ = cmd.Wait() // how it ended stands in its log
	}(m.cmd, m.exited)
	return m.wait()
}

// wait polls mknetd's health until it answers or has ended.
func (m *mkcni) wait() error {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", m.socket())
	}
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	deadline := time.Now().Add(daemonStart)
	for {
		reply, err := client.Get("http://mknetd/v1/daemon/health")
		if err == nil {
			_ = reply.Body.Close()
			return nil
		}
		select {
		case <-m.exited:
			m.cmd = nil
			return fmt.Errorf("mknetd ended at once: %s", m.tail())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("mknetd does not answer within %s: %w: %s", daemonStart, err, m.tail())
		}
	}
}

// tail is the end of mknetd's log.
func (m *mkcni) tail() string {
	raw, _ := os.ReadFile(filepath.Join(m.dir, "mknetd.log"))
	if len(raw) > 2000 {
		raw = raw[len(raw)-2000:]
	}
	return string(raw)
}

// end stops mknetd as a service manager would.
func (m *mkcni) end() error {
	if m.cmd == nil {
		return nil
	}
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-m.exited:
		m.cmd = nil
		return nil
	case <-time.After(daemonStop):
		return fmt.Errorf("mknetd does not end within %s: %s", daemonStop, m.tail())
	}
}

func (m *mkcni) Stop() error {
	if err := m.end(); err != nil {
		return err
	}
	return os.RemoveAll(m.dir)
}

// Reset begins with an empty store, so that nothing of the check before is known.
func (m *mkcni) Reset() error {
	if err := m.end(); err != nil {
		return err
	}
	for _, sub := range []string{"state", "cache"} {
		if err := os.RemoveAll(filepath.Join(m.dir, sub)); err != nil {
			return err
		}
	}
	if err := m.begin(); err != nil {
		return err
	}
	return prime(m)
}

// Small restarts mknetd with a pool of one endpoint.
func (m *mkcni) Small() (Conf, func() error, error) {
	restart := func(pool string) error {
		if err := m.end(); err != nil {
			return err
		}
		m.pool = pool
		return m.begin()
	}
	usual := m.pool
	return m.Conf(), func() error { return restart(usual) }, restart(smallPool)
}

func (m *mkcni) Delegating(ipam string) (Conf, error) {
	if m.pods {
		return m.Conf().with(Conf{"ipam": map[string]any{"type": ipam}}), nil
	}
	return nil, meaningless("the multikernel mode delegates nothing: mknetd owns the addresses")
}

func (m *mkcni) StopDaemon() (func() error, error) {
	if err := m.end(); err != nil {
		return nil, err
	}
	return func() error {
		if m.cmd != nil {
			return nil
		}
		return m.begin()
	}, nil
}

// LoseReservation: the address and the record are one thing in mknetd's store,
// which is emptied behind its back.
func (m *mkcni) LoseReservation(string, string) error {
	if err := m.end(); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(m.dir, "state")); err != nil {
		return err
	}
	return m.begin()
}

// Shaped asks for a rate by the bandwidth capability.
func (m *mkcni) Shaped() (Conf, map[string]any, func() error, error) {
	conf := m.Conf().with(Conf{"capabilities": map[string]any{"bandwidth": true}})
	rate := map[string]any{"bandwidth": map[string]any{"ingressRate": 8000000, "ingressBurst": 8000000, "egressRate": 8000000, "egressBurst": 8000000}}
	lose := func() error {
		links, err := m.hostLinks()
		if err != nil {
			return err
		}
		lost := 0
		for _, name := range links {
			if _, err := netlab.Try("tc", "qdisc", "del", "dev", name, "root"); err == nil {
				lost++
			}
		}
		if lost == 0 {
			return fmt.Errorf("none of %v has a root qdisc: nothing is shaped", links)
		}
		return nil
	}
	return conf, rate, lose, nil
}

// hostLinks lists the host's ends of all endpoints.
func (m *mkcni) hostLinks() ([]string, error) {
	out, err := netlab.Try("ip", "-j", "link", "show", "type", "veth")
	if err != nil {
		return nil, err
	}
	var links []struct {
		Name string `json:"ifname"`
	}
	if err := json.Unmarshal([]byte(out), &links); err != nil {
		return nil, err
	}
	var names []string
	for _, l := range links {
		if strings.HasPrefix(l.Name, endpoint.HostLinkPrefix) || strings.HasPrefix(l.Name, endpoint.PodLinkPrefix) {
			names = append(names, l.Name)
		}
	}
	return names, nil
}

// Degrade takes the egress down and its default route with it.
func (m *mkcni) Degrade(*Attachment) (func() error, error) {
	if _, err := netlab.Try("ip", "route", "del", "default"); err != nil {
		return nil, err
	}
	return func() error {
		_, err := netlab.Try("ip", "route", "add", "default", "via", netlab.InternetAddr, "dev", netlab.UplinkName)
		return err
	}, nil
}

// Jam refers to the endpoint's chain from a foreign one: the kernel refuses to
// delete a chain that something jumps to.
func (m *mkcni) Jam(a Attachment) (func() error, error) {
	if m.pods {
		return m.jamPod(a)
	}
	out, err := exec.Command(m.daemon, "endpoints", "--socket", m.socket(), "-o", "json").Output()
	if err != nil {
		return nil, fmt.Errorf("mknetd endpoints: %w", err)
	}
	var list api.EndpointList
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("mknetd endpoints: %w", err)
	}
	for _, e := range list.Endpoints {
		if e.ContainerID != a.ID {
			continue
		}
		jump := []string{"-w", "-t", "filter", "-A", "OUTPUT", "-d", "203.0.113.77", "-j", e.Chain}
		if _, err := netlab.Try("iptables", jump...); err != nil {
			return nil, err
		}
		jump[3] = "-D"
		return func() error { _, err := netlab.Try("iptables", jump...); return err }, nil
	}
	return nil, fmt.Errorf("mknetd knows no endpoint of %s", a.ID)
}

func (m *mkcni) Unsupported() (Conf, map[string]any, string, string, error) {
	if m.pods {
		conf := m.Conf().with(Conf{"capabilities": map[string]any{"infinibandGUID": true}})
		return conf, map[string]any{"infinibandGUID": "c2:11:22:33:44:55:66:77"}, "infinibandGUID", "c2:11:22:33:44:55:66:77", nil
	}
	conf := m.Conf().with(Conf{"capabilities": map[string]any{"mac": true}})
	return conf, map[string]any{"mac": "02:00:00:00:00:05"}, "mac", "02:00:00:00:00:05", nil
}
