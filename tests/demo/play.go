package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// The demo's addresses (RFC 5737); the child pool is mknetd's default.
const (
	internetAddr = "198.51.100.1"
	hostAddr     = "198.51.100.10"
	metadataAddr = "169.254.169.254"
	mtu          = 1400
)

// demo is the cast: where the programs are, and who plays.
type demo struct {
	*show
	dir, bin, cnitool, self string

	mknetd   *exec.Cmd
	children [2]*child
}

// child is one child kernel, played by a process with its own network, mount and
// UTS namespaces, and the CNI namespace in the primary that stands for it.
type child struct {
	name   string // "child1": its host name, and the sandbox ID
	netns  string // the CNI namespace, made by the caller
	addr   string // from the ADD result
	gw     string
	gen    string // endpoint generation
	agent  *exec.Cmd
	shim   *exec.Cmd
	socket string // what stands for the vsock
}

// in is the prefix that runs a command inside the child.
func (c *child) in() string { return fmt.Sprintf("nsenter -t %d -n -m -u -- ", c.agent.Process.Pid) }

// play is the whole demo; it returns an error where going on makes no sense.
func (d *demo) play() error {
	for _, act := range []func() error{d.stage, d.daemon, d.add, d.connect, d.traffic, d.isolation, d.views, d.pods, d.tearDown} {
		if err := act(); err != nil {
			return err
		}
	}
	return nil
}

// stage builds the private host's surroundings.
func (d *demo) stage() error {
	d.chapter("A host with one NIC, and the internet behind it")
	d.step("the internet: a namespace with 198.51.100.1, and the metadata address of a cloud", strings.Join([]string{
		"ip netns add internet",
		"ip -n internet link set lo up",
		fmt.Sprintf("ip link add up0 mtu %d type veth peer name inet0 mtu %d netns internet", mtu, mtu),
		"ip -n internet addr add " + internetAddr + "/24 dev inet0",
		"ip -n internet addr add " + metadataAddr + "/32 dev lo",
		"ip -n internet link set inet0 up",
		"ip -n internet route add 172.30.0.0/16 via " + hostAddr,
	}, " && \\\n     "), expect{})
	d.step("the host's egress up0 and its default route", "ip addr add "+hostAddr+"/24 dev up0 && ip link set up0 up && ip route add default via "+internetAddr, expect{})
	if _, err := d.start("internet", "ip", "netns", "exec", "internet", d.self, "internet"); err != nil {
		return err
	}
	if _, err := d.start("host-service", d.self, "hello", hostAddr+":8080", "a service of the primary"); err != nil {
		return err
	}
	return until(20*time.Second, func() error {
		return exec.Command("curl", "-s", "--max-time", "1", "http://"+internetAddr+"/", "http://"+hostAddr+":8080/").Run()
	})
}

// daemon starts mknetd.
func (d *demo) daemon() error {
	d.chapter("mknetd")
	config := "resolver:\n  nameservers: [" + metadataAddr + "]\npools: [{name: pods, prefix: " + podPrefix + "}]\n"
	if err := os.WriteFile("/etc/mknetd/config.yaml", []byte(config), 0o600); err != nil {
		return err
	}
	var err error
	if d.mknetd, err = d.start("mknetd", d.bin+"/mknetd", "serve"); err != nil {
		return err
	}
	err = until(20*time.Second, func() error { return exec.Command(d.bin+"/mknetd", "endpoints").Run() })
	if err != nil {
		return fmt.Errorf("mknetd does not answer: %w", err)
	}
	d.step("a fresh node has no object of ours but the shared chains", d.bin+"/mknetd inventory", expect{quiet: true})
	return nil
}

// add asks for two networks, as a container runtime would.
func (d *demo) add() error {
	d.chapter("ADD and CHECK by cnitool")
	conf := `{"cniVersion":"1.0.0","name":"mknet","plugins":[{"type":"mk-cni"}]}`
	if err := os.MkdirAll("/etc/cni/net.d", 0o755); err != nil {
		return err
	}
	if err := os.WriteFile("/etc/cni/net.d/10-mknet.conflist", []byte(conf), 0o644); err != nil {
		return err
	}
	for i := range d.children {
		c := &child{name: fmt.Sprintf("child%d", i+1), netns: fmt.Sprintf("cni-%d", i+1), socket: fmt.Sprintf("%s/child%d.sock", d.dir, i+1)}
		d.children[i] = c
		d.step("the runtime makes a namespace", "ip netns add "+c.netns, expect{})
		out := d.step("ADD", d.cni("add", c), expect{has: []string{`"eth0"`}})
		c.addr, c.gw = between(out, `"address": "`, "/30"), between(out, `"gateway": "`, `"`)
		if c.addr == "" || c.gw == "" {
			return fmt.Errorf("ADD of %s gave no address", c.name)
		}
		d.step("CHECK", d.cni("check", c), expect{})
	}
	out := d.step("what the daemon has", d.bin+"/mknetd endpoints -o json", expect{has: []string{`"READY"`}, quiet: true})
	for _, c := range d.children {
		c.gen = generationOf(out, c.addr)
		if c.gen == "" {
			return fmt.Errorf("no endpoint has the address %s", c.addr)
		}
	}
	d.step("the same as a table", d.bin+"/mknetd endpoints", expect{has: []string{d.children[0].addr, d.children[1].addr, "READY"}})
	d.step("ADD of the same attachment again is an error", d.cni("add", d.children[0]), expect{fails: true})
	return nil
}

// cni is a cnitool command line. cnitool derives the container ID from the path.
func (d *demo) cni(verb string, c *child) string {
	return fmt.Sprintf("CNI_PATH=%s NETCONFPATH=/etc/cni/net.d %s %s mknet /run/netns/%s", d.bin, d.cnitool, verb, c.netns)
}

// connect boots the children and joins each to its endpoint.
func (d *demo) connect() error {
	d.chapter("Two children boot; the runtime binds their endpoints")
	for _, c := range d.children {
		tokens := d.dir + "/" + c.name
		d.step("a token for both sides", fmt.Sprintf("%s/mk-shim token %s.token", d.bin, tokens), expect{})
		identity := tokens + ".identity"
		text := fmt.Sprintf(`{"sandboxID":%q,"sandboxGeneration":"boot-1","endpointGeneration":%q}`, c.name, c.gen)
		if err := os.WriteFile(identity, []byte(text), 0o400); err != nil {
			return err
		}
		boot := strings.Join([]string{
			"hostname " + c.name,
			"mount --make-rprivate /",
			// An /etc of the child's own: the machine's below, changes on a tmpfs.
			"mount -t tmpfs tmpfs /mnt && mkdir /mnt/up /mnt/work && mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/up,workdir=/mnt/work /etc",
			"ip link set lo up",
			fmt.Sprintf("exec %s/mk-agent run --listen unix://%s --identity %s --token %s.token", d.bin, c.socket, identity, tokens),
		}, " && ")
		var err error
		if c.agent, err = d.start(c.name, "unshare", "--net", "--mount", "--uts", "bash", "-c", boot); err != nil {
			return err
		}
		c.shim, err = d.start("shim-"+c.name, d.bin+"/mk-shim", "run", "--endpoint", c.gen,
			"--sandbox-id", c.name, "--sandbox-generation", "boot-1", "--agent", "unix://"+c.socket, "--token", tokens+".token")
		if err != nil {
			return err
		}
	}
	for _, c := range d.children {
		err := until(30*time.Second, func() error {
			return exec.Command("bash", "-c", c.in()+"ping -c1 -W1 "+c.gw).Run()
		})
		if err != nil {
			return fmt.Errorf("%s has no network: %w", c.name, err)
		}
		d.step(c.name+": its interface", c.in()+"ip addr show mkn0", expect{has: []string{c.addr + "/30", fmt.Sprintf("mtu %d", mtu)}})
		if _, err := d.start("hello-"+c.name, "bash", "-c", "exec "+c.in()+d.self+" hello :80 '"+c.name+" here'"); err != nil {
			return err
		}
	}
	return nil
}

// between returns what stands in text after start and before end; empty when
// either is missing.
func between(text, start, end string) string {
	_, rest, ok := strings.Cut(text, start)
	if !ok {
		return ""
	}
	found, _, ok := strings.Cut(rest, end)
	if !ok {
		return ""
	}
	return found
}
