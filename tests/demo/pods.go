package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// podPrefix is where the second act's pods get their addresses.
const podPrefix = "10.88.0.0/16"

// pod is an ordinary pod: a namespace of the primary's own kernel.
type pod struct {
	name, netns, addr, gw, gen string
}

func (p *pod) in() string { return "ip netns exec " + p.netns + " " }

// pods is the second act.
func (d *demo) pods() error {
	d.chapter("Second act: two ordinary pods beside the children")
	conf := `{"cniVersion":"1.0.0","name":"mkpods","plugins":[{"type":"mk-cni","mode":"veth"}]}`
	if err := os.WriteFile("/etc/cni/net.d/20-mkpods.conflist", []byte(conf), 0o644); err != nil {
		return err
	}
	two := [2]*pod{}
	for i := range two {
		p := &pod{name: fmt.Sprintf("pod%d", i+1), netns: fmt.Sprintf("pod-%d", i+1)}
		two[i] = p
		if err := d.addPod(p); err != nil {
			return err
		}
	}
	a, b := two[0], two[1]
	d.step("children and pods in one table", d.bin+"/mknetd endpoints", expect{has: []string{d.children[0].addr, a.addr, b.addr, "mkpods"}})
	if err := d.podTraffic(a, b); err != nil {
		return err
	}
	if err := d.restartUnderPing(a, b); err != nil {
		return err
	}
	if err := d.policy(a, b); err != nil {
		return err
	}
	for _, p := range two {
		d.step("CHECK of "+p.name, d.cniPod("check", p), expect{})
		d.step("DEL", d.cniPod("del", p), expect{})
	}
	d.step("no pod is left", d.bin+"/mknetd endpoints", expect{lacks: []string{a.addr, b.addr}})
	d.step("nor anything of one in the kernel", "ip -o link; ip route; find /sys/fs/bpf/mknet", expect{quiet: true, lacks: []string{"lxc", a.addr, b.addr}})
	d.step("what is there has its record", d.bin+"/mknetd inventory", expect{quiet: true})
	return nil
}

// addPod asks for one pod's network, as the runtime does.
func (d *demo) addPod(p *pod) error {
	d.step("the runtime makes a namespace", "ip netns add "+p.netns+" && ip -n "+p.netns+" link set lo up", expect{})
	out := d.step("ADD", d.cniPod("add", p), expect{has: []string{`"eth0"`, "lxc"}})
	p.addr, p.gw = between(out, `"address": "`, "/16"), between(out, `"gateway": "`, `"`)
	if p.addr == "" || p.gw == "" {
		return fmt.Errorf("ADD of %s gave no address", p.name)
	}
	list, err := d.quiet(d.bin + "/mknetd endpoints -o json")
	if err != nil {
		return err
	}
	if p.gen = generationOf(list, p.addr); p.gen == "" {
		return fmt.Errorf("no endpoint has the address %s", p.addr)
	}
	_, err = d.start("hello-"+p.name, "bash", "-c", "exec "+p.in()+d.self+" hello :80 '"+p.name+" here'")
	return err
}

func (d *demo) cniPod(verb string, p *pod) string {
	return fmt.Sprintf("CNI_PATH=%s NETCONFPATH=/etc/cni/net.d %s %s mkpods /run/netns/%s", d.bin, d.cnitool, verb, p.netns)
}

// podTraffic shows whom pods reach, and which way the packets go.
func (d *demo) podTraffic(a, b *pod) error {
	for _, p := range []*pod{a, b} {
		if err := until(20*time.Second, func() error { return exec.Command("curl", "-s", "--max-time", "1", "http://"+p.addr+"/").Run() }); err != nil {
			return fmt.Errorf("%s does not answer: %w", p.name, err)
		}
	}
	before, err := d.redirected(a)
	if err != nil {
		return err
	}
	d.step("pod to pod", a.in()+"ping -c5 -i0.2 -W5 "+b.addr, expect{has: []string{" 0% packet loss"}})
	d.step("pod to pod over TCP", a.in()+"curl -s --max-time 10 http://"+b.addr+"/", expect{has: []string{b.name + " here"}})
	d.step("the eBPF programs have put them into the other pod", d.bin+"/mknetd endpoints "+a.gen+" | grep -E '^(peer|redirect) '", expect{has: []string{" packets"}})
	after, err := d.redirected(a)
	if err != nil {
		return err
	}
	if sent := after - before; sent < 5 {
		d.verdict([]string{fmt.Sprintf("only %d packets went the short way", sent)})
	}
	d.step("pod to the internet, by the primary's address", a.in()+"curl -s --max-time 10 http://"+internetAddr+"/", expect{has: []string{"hello, " + hostAddr + ":"}})
	d.step("the node to a pod", "curl -s --max-time 10 http://"+a.addr+"/", expect{has: []string{a.name + " here"}})
	d.step("a pod to a service of the node", a.in()+"curl -s --max-time 10 http://"+hostAddr+":8080/", expect{has: []string{"service"}})
	d.step("a pod to a child (podAccess: deny)", a.in()+"curl -s --max-time 2 http://"+d.children[0].addr+"/", expect{fails: true, lacks: []string{"here"}})
	d.step("a child to a pod", d.children[0].in()+"curl -s --max-time 2 http://"+a.addr+"/", expect{fails: true, lacks: []string{"here"}})
	return nil
}

// redirected is how many packets of the pod the programs put into another one.
func (d *demo) redirected(p *pod) (int, error) {
	out, err := d.quiet(d.bin + "/mknetd endpoints " + p.gen)
	if err != nil {
		return 0, err
	}
	total := 0
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) > 2 && (f[0] == "peer" || f[0] == "redirect") {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				return 0, fmt.Errorf("counters of %s: %w", p.name, err)
			}
			total += n
		}
	}
	return total, nil
}

// restartUnderPing kills mknetd and starts it again for as long as a ping runs.
func (d *demo) restartUnderPing(a, b *pod) error {
	ping, err := d.start("ping", "ip", "netns", "exec", a.netns, "ping", "-q", "-c100", "-i0.05", "-W5", b.addr)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- ping.Wait() }()
	kills := 0
	for running := true; running; kills++ {
		_ = d.mknetd.Process.Kill()
		_ = d.mknetd.Wait() // killed is how it ends
		if d.mknetd, err = d.start("mknetd", d.bin+"/mknetd", "serve"); err != nil {
			return err
		}
		if err := until(60*time.Second, func() error { return exec.Command(d.bin+"/mknetd", "endpoints").Run() }); err != nil {
			return fmt.Errorf("mknetd does not answer after it was killed: %w", err)
		}
		select {
		case err = <-done:
			running = false
		default:
		}
	}
	if err != nil {
		d.verdict([]string{"ping: " + err.Error()})
	}
	d.step(fmt.Sprintf("mknetd was killed and started again %d times meanwhile: no packet is lost", kills), "cat "+d.log("ping"), expect{has: []string{"100 packets transmitted, 100 received, 0% packet loss"}})
	return nil
}
