package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/twokernel/wire"
)

// Addresses of the internet and of the primary's egress (RFC 5737).
const (
	internetAddr = wire.SiteAddr
	primaryAddr  = "198.51.100.10"
	metadataAddr = "169.254.169.254"
	mtuBytes     = 1400
	strangerCID  = "4242" // nobody's
)

// Exit codes of mk-shim that the scenario provokes (shim/main.go).
const (
	shimRefused           = 3  // by mknetd
	shimSandboxGeneration = 11 // by the child
)

// play is the scenario. A step that does not hold is counted; an act's error ends
// the part.
func (s *stage) play() error {
	failed := s.failed
	defer func() {
		if s.failed > failed {
			s.logs()
		}
	}()
	for _, act := range []func() error{s.surroundings, s.daemon, s.add, s.connect, s.traffic, s.pods, s.restartAgent, s.rebootChild, s.del, s.nothingLeft} {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		if err := act(); err != nil {
			return err
		}
	}
	return nil
}

// errNoSense ends a part early: what follows would fail with it, slowly.
var errNoSense = errors.New("nothing else can work")

// surroundings are an internet and an egress towards it.
func (s *stage) surroundings() error {
	s.command("an internet behind the primary's egress", s.primary, strings.Join([]string{
		"ip netns add internet",
		"ip -n internet link set lo up",
		fmt.Sprintf("ip link add up0 mtu %d type veth peer name inet0 mtu %d netns internet", mtuBytes, mtuBytes),
		"ip -n internet addr add " + internetAddr + "/24 dev inet0",
		"ip -n internet addr add " + metadataAddr + "/32 dev lo",
		"ip -n internet link set inet0 up",
		"ip addr add " + primaryAddr + "/24 dev up0",
		"ip link set up0 up",
		"ip route add default via " + internetAddr,
	}, " && "), expect{})
	if err := s.primary.Start("internet", s.tool("ip"), "netns", "exec", "internet", s.inguest, "internet", internetAddr+":53", metadataAddr+":53"); err != nil {
		return err
	}
	return until(stepLimit, func() error {
		return s.mustRun(s.inguest + " fetch http://" + internetAddr + "/")
	})
}

// tool is the path of a program of the system; Start wants one.
func (s *stage) tool(name string) string {
	out, _, _ := s.primary.Run("command -v "+name, stepLimit)
	return strings.TrimSpace(out)
}

func (s *stage) daemon() error {
	if err := s.mustRun("mkdir -p /etc/mknetd /etc/cni/net.d"); err != nil {
		return err
	}
	if err := s.write("/etc/mknetd/config.yaml", "resolver:\n  nameservers: ["+metadataAddr+"]\npools:\n- name: pods\n  prefix: "+podPool+"\n", 0o600); err != nil {
		return err
	}
	conf := `{"cniVersion":"1.1.0","name":"mknet","plugins":[{"type":"mk-cni"}]}`
	if err := s.write("/etc/cni/net.d/10-mknet.conflist", conf, 0o644); err != nil {
		return err
	}
	if err := s.primary.Start("mknetd", s.bin+"/mknetd", "serve"); err != nil {
		return err
	}
	if !s.check("mknetd serves", func() error {
		return until(linkLimit, func() error { return s.mustRun(s.bin + "/mknetd endpoints") })
	}) {
		return errNoSense
	}
	return nil
}

func (s *stage) cni(verb string) string {
	return fmt.Sprintf("CNI_PATH=%s NETCONFPATH=/etc/cni/net.d %s %s mknet /run/netns/cni-1", s.bin, s.cnitool, verb)
}

func (s *stage) add() error {
	if err := s.mustRun("ip netns add cni-1"); err != nil {
		return err
	}
	s.command("ADD", s.primary, s.cni("add"), expect{has: []string{`"eth0"`}})
	s.command("CHECK", s.primary, s.cni("check"), expect{})
	eps, err := s.endpoints()
	if err != nil {
		return err
	}
	if len(eps) != 1 {
		return fmt.Errorf("mknetd has %d endpoints after one ADD", len(eps))
	}
	s.addr, s.gw, s.generation = eps[0].Address.String(), eps[0].Gateway.String(), eps[0].Generation.String()
	return nil
}

// endpoints asks the daemon.
func (s *stage) endpoints() ([]endpoint.Endpoint, error) {
	out, status, err := s.primary.Run(s.bin+"/mknetd endpoints -o json", stepLimit)
	if err == nil && status != 0 {
		err = fmt.Errorf("exit status %d", status)
	}
	var list api.EndpointList
	if err == nil {
		err = json.Unmarshal([]byte(out), &list)
	}
	if err != nil {
		return nil, fmt.Errorf("mknetd endpoints: %w\n%s", err, out)
	}
	return list.Endpoints, nil
}

func (s *stage) startAgent() error { return s.child.Start("agent", s.child.agent...) }

// startShim starts the shim for a child's generation.
func (s *stage) startShim(generation string, key []byte) error {
	token := "/run/token-" + generation
	if err := s.write(token, string(key), 0o400); err != nil {
		return err
	}
	return s.primary.Start("shim-"+generation, s.shim(generation)...)
}

func (s *stage) shim(generation string) []string {
	return []string{
		s.bin + "/mk-shim", "run", "--endpoint", s.generation, "--sandbox-id", sandboxID, "--sandbox-generation", generation,
		"--agent", s.agentURL, "--token", "/run/token-" + generation, "--keepalive", "20s", "--connect-timeout", "10m",
	}
}

// waitLink waits until the child reaches its gateway.
func (s *stage) waitLink() error {
	return until(linkLimit, func() error {
		out, status, err := s.child.Run(s.child.in+"ping -c1 -W2 "+s.gw, stepLimit)
		if err == nil && status != 0 {
			err = fmt.Errorf("no answer to ping:\n%s", out)
		}
		return err
	})
}

// connect binds the endpoint to the child.
func (s *stage) connect() error {
	if err := s.startAgent(); err != nil {
		return err
	}
	if err := s.startShim("boot-1", s.child.key); err != nil {
		return err
	}
	if !s.check("BIND, and the child reaches its gateway over "+s.agentURL, s.waitLink) {
		return errNoSense
	}
	s.check("mknetd has the binding", func() error {
		eps, err := s.endpoints()
		if err != nil {
			return err
		}
		if len(eps) != 1 || eps[0].Binding == nil || eps[0].Binding.Sandbox.Generation != "boot-1" {
			return fmt.Errorf("endpoints: %+v", eps)
		}
		return nil
	})
	s.command("the child's interface", s.child, s.child.in+"ip addr show mkn0", expect{has: []string{s.addr + "/30", fmt.Sprintf("mtu %d", mtuBytes)}})
	return nil
}

// carries shows that the link carries: ping out, and 16 MiB by their hash.
func (s *stage) carries(when string) {
	c := s.child
	// One packet: after the first answer, ping waits for the others for two round
	// trips only.
	s.command("ping out"+when, c, c.in+"ping -c1 -W20 "+internetAddr, expect{has: []string{" 0% packet loss"}})
	s.command("16 MiB over HTTP through MASQUERADE, by their SHA-256"+when, c,
		c.in+c.inguest+" fetch http://"+internetAddr+wire.PayloadPath,
		expect{has: []string{fmt.Sprint(wire.PayloadHash(), " ", wire.PayloadBytes)}, limit: payloadLimit})
}

func (s *stage) traffic() error {
	c := s.child
	s.carries("")
	s.command("the server saw the primary's address", s.primary, fmt.Sprintf("grep 'from=%s path=%s' %s", primaryAddr, wire.PayloadPath, s.primary.LogPath("internet")), expect{})
	s.command("the child's resolver", c, "cat "+c.resolvConf, expect{has: []string{"nameserver " + metadataAddr}})
	s.command("DNS at the metadata address", c, c.in+c.inguest+" lookup "+wire.SiteName, expect{has: []string{internetAddr}})
	s.command("MTU: 1,372 bytes of ping data fit", c, c.in+"ping -M do -s 1372 -c1 -W10 "+internetAddr, expect{has: []string{" 0% packet loss"}})
	s.command("MTU: 1,373 do not", c, c.in+"ping -M do -s 1373 -c1 -W2 "+internetAddr, expect{status: anyFailure, has: []string{"essage too long"}})
	return nil
}

// restartAgent kills the agent: the shim stays and finds the next one.
func (s *stage) restartAgent() error {
	s.check("the agent is killed", func() error { return s.killAgent() })
	if err := s.strangerToAgent(); err != nil {
		return err
	}
	if err := s.startAgent(); err != nil {
		return err
	}
	if !s.check("with a new agent the link carries again", s.waitLink) {
		return errNoSense
	}
	s.check("the shim is the same", func() error {
		status, ended, err := s.primary.Wait("shim-boot-1", time.Millisecond)
		if ended {
			return fmt.Errorf("it has ended with status %d", status)
		}
		return err
	})
	return nil
}

// strangerToAgent lets an agent look for the shim at a CID that is not the shim's:
// it must not let it in.
func (s *stage) strangerToAgent() error {
	args := slices.Clone(s.child.agent)
	if i := slices.Index(args, "--allow-cid"); i >= 0 {
		args[i+1] = strangerCID
	} else {
		args = append(args, "--allow-cid", strangerCID)
	}
	if err := s.child.Start("agent", args...); err != nil {
		return err
	}
	s.check("an agent that allows another CID only refuses the shim", func() error {
		return until(linkLimit, func() error {
			_, status, err := s.child.Run("grep 'CID [0-9]* is not allowed' "+s.child.LogPath("agent"), stepLimit)
			if err == nil && status != 0 {
				err = errors.New("the agent's log names no refused CID")
			}
			return err
		})
	})
	s.command("and no packet moves", s.child, s.child.in+"ping -c1 -W2 "+s.gw, expect{status: anyFailure})
	return s.killAgent()
}

func (s *stage) killAgent() error {
	if err := s.child.Signal("agent", syscall.SIGKILL); err != nil {
		return err
	}
	_, err := s.ended(s.child, "agent")
	return err
}

// ended waits for a program's end and returns its status.
func (s *stage) ended(m machine, name string) (int, error) {
	status, ended, err := m.Wait(name, linkLimit)
	if err == nil && !ended {
		err = fmt.Errorf("%s still runs after %s", name, linkLimit)
	}
	return status, err
}

// rebootChild kills the child's kernel; the next one is another sandbox
// generation, which the old shim must not reach.
func (s *stage) rebootChild() error {
	s.check("the child is killed", s.killChild)
	var err error
	begin := time.Now()
	if s.child, err = s.bootChild("boot-2"); err != nil {
		return err
	}
	s.pass("another child boots in its place: generation boot-2", time.Since(begin))
	if err := s.startAgent(); err != nil {
		return err
	}
	s.check(fmt.Sprintf("the old shim is refused: exit code %d, sandbox generation mismatch", shimSandboxGeneration), func() error {
		status, err := s.ended(s.primary, "shim-boot-1")
		if err == nil && status != shimSandboxGeneration {
			err = fmt.Errorf("exit code %d", status)
		}
		return err
	})
	s.command("the new child was not configured by it", s.child, s.child.in+"ip -o link", expect{lacks: []string{"mkn0"}})
	if err := s.startShim("boot-2", s.child.key); err != nil {
		return err
	}
	if !s.check("BIND to boot-2, and the link carries", s.waitLink) {
		return errNoSense
	}
	s.command(fmt.Sprintf("a shim for boot-1 is refused by mknetd: exit code %d", shimRefused), s.primary, strings.Join(s.shim("boot-1"), " "),
		expect{status: shimRefused, has: []string{"boot-2"}})
	s.carries(", boot-2")
	return nil
}

// del ends everything in order.
func (s *stage) del() error {
	s.command("DEL while the shim lives is refused", s.primary, s.cni("del"), expect{status: anyFailure})
	s.check("the shim ends with UNBIND when told", func() error {
		if err := s.primary.Signal("shim-boot-2", syscall.SIGTERM); err != nil {
			return err
		}
		status, err := s.ended(s.primary, "shim-boot-2")
		if err == nil && status != 0 {
			err = fmt.Errorf("exit code %d", status)
		}
		return err
	})
	s.command("DEL", s.primary, s.cni("del"), expect{})
	s.command("DEL again", s.primary, s.cni("del"), expect{})
	s.check("no endpoint is left", func() error {
		eps, err := s.endpoints()
		if err == nil && len(eps) > 0 {
			err = fmt.Errorf("%+v", eps)
		}
		return err
	})
	return nil
}

// nothingLeft looks at both kernels. In the child, mkn0 stays when the agent ends
// (its documentation says so: it keeps its address for the next agent), without a
// carrier; removing it must leave the kernel as it booted.
func (s *stage) nothingLeft() error {
	p, c := s.primary, s.child
	digits := s.generation[:11]
	s.command("the primary's inventory is empty", p, s.bin+"/mknetd inventory", expect{lacks: []string{digits}})
	s.check("the agent ends in order", func() error {
		if err := c.Signal("agent", syscall.SIGTERM); err != nil {
			return err
		}
		status, err := s.ended(c, "agent")
		if err == nil && status != 0 {
			err = fmt.Errorf("exit code %d", status)
		}
		return err
	})
	s.check("mknetd ends, and purge takes its shared chains", func() error {
		if err := p.Signal("mknetd", syscall.SIGTERM); err != nil {
			return err
		}
		status, err := s.ended(p, "mknetd")
		if err == nil && status != 0 {
			err = fmt.Errorf("exit code %d", status)
		}
		return errors.Join(err, s.mustRun(s.bin+"/mknetd purge --yes"))
	})
	s.command("the primary's kernel holds nothing of it", p, "ip -o link; ip -n cni-1 -o link; ip -n cni-1 rule; ip route; iptables-save; conntrack -L 2>/dev/null",
		expect{lacks: []string{digits, "mkv", "mkhost", "MK-", "MKNET", "eth0", "lookup 1", "172.30.", "src=" + s.addr}})
	s.command("the child's mkn0 stays without a carrier", c, c.in+"ip -o link show mkn0", expect{has: []string{"NO-CARRIER"}})
	s.command("the child's kernel holds nothing else", c, fmt.Sprintf("%sip link del mkn0; %sip -o link; %sip route", c.in, c.in, c.in), expect{lacks: []string{"mkn", "172.30."}})
	if s.flows != nil {
		s.check("no vsock connection is left", func() error {
			return until(stepLimit, func() error {
				if n := s.flows(); n > 0 {
					return fmt.Errorf("%d connections", n)
				}
				return nil
			})
		})
	}
	return nil
}
