package main

import (
	"errors"
	"fmt"

	"mknet/spec/endpoint"
	"mknet/tests/twokernel/wire"
)

// podPool is what ordinary pods have their addresses of.
const podPool = "10.88.0.0/24"

// pods are two ordinary pods beside the child, on the primary's kernel: in a guest
// one older than this machine's, without TCX.
func (s *stage) pods() error {
	conf := `{"cniVersion":"1.1.0","name":"mkpods","plugins":[{"type":"mk-cni","mode":"veth"}]}`
	if err := s.write("/etc/cni/net.d/20-mkpods.conflist", conf, 0o644); err != nil {
		return err
	}
	names := []string{"pod-a", "pod-b"}
	cni := func(verb, name string) string {
		return fmt.Sprintf("CNI_PATH=%s NETCONFPATH=/etc/cni/net.d %s %s mkpods /run/netns/%s", s.bin, s.cnitool, verb, name)
	}
	for _, name := range names {
		if err := s.mustRun("ip netns add " + name); err != nil {
			return err
		}
		s.command("ADD of "+name, s.primary, cni("add", name), expect{has: []string{`"eth0"`, `"lxc`}})
	}
	addr := map[string]string{}
	eps, err := s.endpoints()
	if err != nil {
		return err
	}
	for _, ep := range eps {
		for _, name := range names {
			if ep.Mode == endpoint.Veth && ep.Namespace.Path == "/run/netns/"+name {
				addr[name] = ep.Address.String()
			}
		}
	}
	if len(addr) != len(names) {
		return fmt.Errorf("mknetd does not have the pods: %+v", eps)
	}
	in := "ip netns exec pod-a "
	for _, name := range names {
		s.command("CHECK of "+name, s.primary, cni("check", name), expect{})
	}
	s.command("the programs are attached", s.primary, s.bin+"/mknetd inventory", expect{has: []string{"-ingress", "-egress"}})
	s.command("pod to pod", s.primary, in+"ping -c3 -i0.2 -W20 "+addr["pod-b"], expect{has: []string{" 0% packet loss"}})
	s.command("node to pod", s.primary, "ping -c1 -W20 "+addr["pod-a"], expect{has: []string{" 0% packet loss"}})
	s.command("pod to the internet: 16 MiB through MASQUERADE, by their SHA-256", s.primary, in+s.inguest+" fetch http://"+internetAddr+wire.PayloadPath,
		expect{has: []string{fmt.Sprint(wire.PayloadHash(), " ", wire.PayloadBytes)}, limit: payloadLimit})
	s.command("a pod does not reach the child", s.primary, in+"ping -c1 -W2 "+s.addr, expect{status: anyFailure})
	if err := s.policy(in, addr["pod-b"]); err != nil {
		return err
	}
	for _, name := range names {
		s.command("DEL of "+name, s.primary, cni("del", name), expect{})
		s.check(name+" is empty again", func() error {
			out, status, err := s.primary.Run("ip -n "+name+" -o link show type veth", stepLimit)
			if err == nil && (status != 0 || out != "") {
				err = errors.New(out)
			}
			return err
		})
		if err := s.mustRun("ip netns del " + name); err != nil {
			return err
		}
	}
	return nil
}

// closedPod drops what reaches pod-b by ICMP.
const closedPod = `apiVersion: mknet/v1
kind: NetworkACL
metadata: {name: closed}
spec: {ingress: [{priority: 1, action: deny, protocol: icmp}, {priority: 2, action: allow}]}
---
apiVersion: mknet/v1
kind: Attachment
metadata: {name: closed}
spec: {networkACLRef: {name: closed}, subnets: [%s/32]}
`

// policy is the verifier of this kernel, and rules that come and go under it.
func (s *stage) policy(in, addr string) error {
	s.command("the verifier takes the programs for less than 5 %", s.primary, s.bin+"/mknetd verifier-check", expect{has: []string{"from_container", "to_child"}})
	if err := s.write("/root/closed.yaml", fmt.Sprintf(closedPod, addr), 0o600); err != nil {
		return err
	}
	s.command("policy apply", s.primary, s.bin+"/mknetd policy apply -f /root/closed.yaml", expect{has: []string{"created"}})
	s.command("what the policy denies", s.primary, in+"ping -c2 -W2 "+addr, expect{status: anyFailure})
	s.command("policy delete", s.primary, s.bin+"/mknetd policy delete attachment/closed networkacl/closed", expect{has: []string{"deleted"}})
	s.command("and without it", s.primary, in+"ping -c3 -i0.2 -W20 "+addr, expect{has: []string{" 0% packet loss"}})
	return nil
}
