package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"mknet/tests/twokernel/guest"
	"mknet/tests/twokernel/vsockswitch"
)

// playPair plays with two guests that a switch joins.
func playPair(s *stage) error {
	log, err := s.switchLog()
	if err != nil {
		return err
	}
	primary, childSocket := s.dir+"/pair-p.sock", s.dir+"/pair-c.sock"
	sw, err := vsockswitch.NewPair(vsockswitch.PairConfig{
		PrimarySocket: primary, ChildSocket: childSocket, PrimaryCID: primaryCID, ChildCID: childCID, Log: log,
	})
	if err != nil {
		return err
	}
	s.later(func() { _ = sw.Close() })
	s.flows = sw.Flows
	s.agentURL = fmt.Sprintf("vsock://%d:%d", childCID, agentPort)
	s.guestChild(childSocket)
	booted := make(chan error, 1)
	go func() { // in parallel: both take their time
		var err error
		s.child, err = s.bootChild("boot-1")
		booted <- err
	}()
	err = s.bootPrimary(primary)
	if err := errors.Join(err, <-booted); err != nil {
		return err
	}
	s.childBooted()
	return s.play()
}

// playHybrid plays with one guest, and this machine's kernel as the primary's.
func playHybrid(s *stage) error {
	log, err := s.switchLog()
	if err != nil {
		return err
	}
	socket, vhost := s.dir+"/hybrid.sock", s.dir+"/hybrid-c.sock"
	sw, err := vsockswitch.NewHybrid(vsockswitch.HybridConfig{GuestSocket: vhost, Socket: socket, CID: childCID, Log: log})
	if err != nil {
		return err
	}
	s.later(func() { _ = sw.Close() })
	s.flows = sw.Links
	s.agentURL = fmt.Sprintf("hvsock://%s:%d", socket, agentPort)
	host := newLocal(s.dir)
	s.later(host.close)
	s.setPrimary(host, s.built.bin, s.built.bin+"/inguest")
	s.guestChild(vhost)
	if s.child, err = s.bootChild("boot-1"); err != nil {
		return err
	}
	s.childBooted()
	return s.play()
}

// guestChild makes the child a guest behind a vhost-user socket.
func (s *stage) guestChild(vsock string) {
	var running *guest.Machine
	s.killChild = func() error {
		running.Kill()
		return nil
	}
	s.bootChild = func(generation string) (*child, error) {
		c, m, err := s.bootGuestChild(generation, vsock)
		if err == nil {
			running = m
		}
		return c, err
	}
	s.later(func() {
		if running != nil {
			running.Kill()
		}
	})
}

func (s *stage) childBooted() {
	if m, ok := s.child.machine.(*guest.Machine); ok {
		s.pass(fmt.Sprintf("the child %s boots Linux %s", s.child.generation, m.Release), m.BootTime)
	}
}

// playLoopback plays in one guest: the child is a namespace, the transport the
// kernel's own loopback.
func playLoopback(s *stage) error {
	if err := s.bootPrimary(""); err != nil {
		return err
	}
	s.agentURL = fmt.Sprintf("vsock://1:%d", agentPort)
	s.killChild = func() error {
		if err := s.primary.Signal("agent", syscall.SIGKILL); err != nil {
			return err
		}
		return s.mustRun("ip netns del child")
	}
	s.bootChild = s.bootNamespaceChild
	var err error
	s.child, err = s.bootChild("boot-1")
	if err != nil {
		return err
	}
	return s.play()
}

// bootNamespaceChild makes a namespace of the primary the child.
func (s *stage) bootNamespaceChild(generation string) (*child, error) {
	c := &child{
		machine: s.primary, in: "ip netns exec child ", generation: generation, key: newToken(),
		identity: "/run/child/identity-" + generation, token: "/run/child/token-" + generation, inguest: "/init",
		resolvConf: "/etc/netns/child/resolv.conf", // ip netns exec shows it as /etc/resolv.conf
	}
	if err := s.mustRun("mkdir -p /run/child /etc/netns/child && touch /etc/netns/child/resolv.conf && ip netns add child && ip -n child link set lo up"); err != nil {
		return nil, err
	}
	for path, data := range map[string][]byte{c.identity: s.identityFile(generation), c.token: c.key} {
		if err := c.WriteFile(path, data, 0o400); err != nil {
			return nil, err
		}
	}
	c.agent = []string{
		"/usr/sbin/ip", "netns", "exec", "child", "/mknet/mk-agent", "run", "--listen", fmt.Sprintf("vsock://any:%d", agentPort),
		"--allow-cid", "1", "--identity", c.identity, "--token", c.token, "--resolv-conf", c.resolvConf,
	}
	return c, nil
}

// mustRun runs a line in the primary that is no step.
func (s *stage) mustRun(line string) error {
	out, status, err := s.primary.Run(line, stepLimit)
	if err == nil && status != 0 {
		err = fmt.Errorf("exit status %d", status)
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", line, err, out)
	}
	return nil
}

// write puts a file into the primary.
func (s *stage) write(path, text string, mode os.FileMode) error {
	return s.primary.WriteFile(path, []byte(text), mode)
}
