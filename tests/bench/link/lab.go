// Package link measures what carries packets between two network namespaces: ours
// in its variants, and other programs. Every measurement begins with fresh
// namespaces and ends with none. It runs inside netlab's private host.
package link

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mknet/tests/bench/side"
	"mknet/tests/netlab"
)

// The namespaces: clients run in near.
const (
	near = "near"
	far  = "far"
)

// Addresses of links that are configured here.
const (
	nearIP = "10.9.0.1"
	farIP  = "10.9.0.2"
)

const (
	ending       = 5 * time.Second // for a process to end by itself
	clockTicks   = 100             // USER_HZ, of every Linux architecture that Go has: proc(5)
	stepPatience = 3 * side.Patience
)

// lab is one link under measurement.
type lab struct {
	dir     string // for sockets and logs
	self    string // this binary
	peers   string // folder of the peers' binaries
	profile string // folder for CPU profiles, or empty

	to      string // where clients find the far end
	noPing  bool   // nobody answers pings there
	carrier []*process
	others  []*process
}

// process is a program that runs in a namespace.
type process struct {
	name   string
	log    string
	cmd    *exec.Cmd
	exited chan struct{}
}

// up makes the namespaces.
func (l *lab) up() error {
	for _, ns := range []string{near, far} {
		if _, err := netlab.Try("ip", "netns", "add", ns); err != nil {
			return err
		}
		// Without IPv6 nothing but the benchmark sends.
		if err := errors.Join(
			l.in(ns, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"),
			l.in(ns, "ip", "link", "set", "lo", "up")); err != nil {
			return err
		}
	}
	return nil
}

// down ends every process and removes the namespaces.
func (l *lab) down() error {
	var err error
	for _, p := range append(l.others, l.carrier...) {
		err = errors.Join(err, p.stop())
	}
	for _, ns := range []string{near, far} {
		if _, e := os.Lstat("/run/netns/" + ns); e == nil {
			_, e = netlab.Try("ip", "netns", "del", ns)
			err = errors.Join(err, e)
		}
	}
	return err
}

func inside(ns, program string, args ...string) []string {
	return append([]string{"nsenter", "--net=/run/netns/" + ns, "--", program}, args...)
}

// in runs a program in a namespace until it ends.
func (l *lab) in(ns, program string, args ...string) error {
	_, err := l.out(ns, program, args...)
	return err
}

func (l *lab) out(ns, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), stepPatience)
	defer cancel()
	c := inside(ns, program, args...)
	var stdout, stderr strings.Builder
	cmd := exec.CommandContext(ctx, c[0], c[1:]...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %s: %w: %s%s", ns, strings.Join(c[3:], " "), err, stdout.String(), stderr.String())
	}
	return stdout.String(), nil
}

// start starts a program in a namespace; down ends it.
func (l *lab) start(list *[]*process, ns string, env []string, program string, args ...string) error {
	p := &process{
		name: filepath.Base(program), exited: make(chan struct{}),
		log: filepath.Join(l.dir, fmt.Sprintf("%s-%d.log", ns, len(l.carrier)+len(l.others))),
	}
	out, err := os.Create(p.log)
	if err != nil {
		return err
	}
	defer out.Close()
	c := inside(ns, program, args...)
	p.cmd = exec.Command(c[0], c[1:]...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = l.dir, out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true,            // for the children that some have
		Pdeathsig: syscall.SIGKILL, // a killed benchmark leaves nothing running
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	go func() {
		_ = p.cmd.Wait() // a process that ends too early is found by alive
		close(p.exited)
	}()
	*list = append(*list, p)
	return nil
}

// alive returns an error with the log of a process that has ended.
func (l *lab) alive() error {
	for _, p := range append(l.others, l.carrier...) {
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended: %s: %s", p.name, p.cmd.ProcessState, p.tail())
		default:
		}
	}
	return nil
}

func (p *process) tail() string {
	raw, _ := os.ReadFile(p.log)
	return strings.TrimSpace(string(raw[max(0, len(raw)-600):]))
}

func (p *process) stop() error {
	signal := func(s syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, s) } // gone is what we want
	signal(syscall.SIGTERM)
	select {
	case <-p.exited:
		return nil
	case <-time.After(ending):
	}
	signal(syscall.SIGKILL)
	select {
	case <-p.exited:
		return nil
	case <-time.After(ending):
		return fmt.Errorf("%s does not end", p.name)
	}
}

// wait polls until f returns nil, a process ends or patience does.
func (l *lab) wait(what string, f func() error) error {
	for deadline := time.Now().Add(side.Patience); ; time.Sleep(10 * time.Millisecond) {
		err := f()
		if err == nil {
			return nil
		}
		if dead := l.alive(); dead != nil {
			return dead
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
}

// configure waits for a link and gives it an address.
func (l *lab) configure(ns, name, ip string, mtuBytes int) error {
	if err := l.wait("link "+name, func() error { return l.in(ns, "ip", "link", "show", name) }); err != nil {
		return err
	}
	return errors.Join(
		l.in(ns, "ip", "link", "set", name, "mtu", strconv.Itoa(mtuBytes), "up"),
		l.in(ns, "ip", "addr", "replace", ip+"/24", "dev", name))
}

// cpuSeconds is what the carrying processes have used so far, user and system.
func (l *lab) cpuSeconds() (sum float64, err error) {
	for _, p := range l.carrier {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		if err != nil {
			return 0, err
		}
		// The name may hold blanks; utime and stime are fields 14 and 15, proc(5).
		f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
		for _, field := range f[11:13] {
			n, err := strconv.ParseUint(field, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc stat of %s: %w", p.name, err)
			}
			sum += float64(n) / clockTicks
		}
	}
	return sum, nil
}

// peakBytes is the largest resident set that one of the carrying processes has had.
func (l *lab) peakBytes() (peak float64, err error) {
	for _, p := range l.carrier {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
		if err != nil {
			return 0, err
		}
		_, rest, _ := strings.Cut(string(raw), "VmHWM:")
		f := strings.Fields(rest)
		if len(f) == 0 {
			return 0, fmt.Errorf("/proc status of %s has no VmHWM", p.name)
		}
		kib, err := strconv.ParseUint(f[0], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc status of %s: %w", p.name, err)
		}
		peak = max(peak, float64(kib)*1024)
	}
	return peak, nil
}
