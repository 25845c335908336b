package main

import (
	"encoding/json"
	"fmt"
	"time"

	"mknet/spec/api"
)

// generationOf finds the endpoint with the given child address in the JSON that
// `mknetd endpoints -o json` prints.
func generationOf(list, addr string) string {
	var reply api.EndpointList
	if err := json.Unmarshal([]byte(list), &reply); err != nil {
		return ""
	}
	for _, ep := range reply.Endpoints {
		if ep.Address.String() == addr {
			return ep.Generation.String()
		}
	}
	return ""
}

// traffic shows what a child may do.
func (d *demo) traffic() error {
	d.chapter("What a child can do")
	one, two := d.children[0], d.children[1]
	d.step("ping to the gateway", one.in()+"ping -c2 -i0.2 -W5 "+one.gw, expect{has: []string{" 0% packet loss"}})
	d.step("ping out", one.in()+"ping -c2 -i0.2 -W5 "+internetAddr, expect{has: []string{" 0% packet loss"}})
	d.step("10 MB over HTTP, by the SHA-256 that the server has", one.in()+"curl -s --max-time 30 http://"+internetAddr+"/10MB | sha256sum", expect{has: []string{payloadHash()}})
	d.step("the server saw the primary's address", "grep -c 'from="+hostAddr+" path=/10MB' "+d.log("internet"), expect{has: []string{"1"}})
	d.step("DNS through the resolver of the configuration", one.in()+"cat /etc/resolv.conf", expect{has: []string{"nameserver " + metadataAddr}})
	d.step("a name", one.in()+"getent hosts www.demo.test", expect{has: []string{internetAddr}})
	d.step("MTU: 1,372 bytes of ping data fit into 1,400", one.in()+"ping -M do -s 1372 -c1 -W5 "+internetAddr, expect{has: []string{" 0% packet loss"}})
	d.step("MTU: 1,373 do not", one.in()+"ping -M do -s 1373 -c1 -W1 "+internetAddr, expect{fails: true})
	d.step("8 KiB datagrams arrive in fragments", one.in()+"ping -s 8192 -c1 -W5 "+internetAddr, expect{has: []string{" 0% packet loss"}})
	for _, c := range d.children {
		addr := c.addr
		d.step("a process of the primary reaches "+c.name, "curl -s --max-time 10 http://"+addr+"/", expect{has: []string{c.name + " here"}})
	}
	d.step("the other child has its own name", two.in()+"hostname", expect{has: []string{two.name}})
	return nil
}

// isolation shows what a child may not do, and who counts it.
func (d *demo) isolation() error {
	d.chapter("What a child cannot do")
	one, two := d.children[0], d.children[1]
	d.step("child to child", one.in()+"curl -s --max-time 2 http://"+two.addr+"/", expect{fails: true, lacks: []string{"here"}})
	d.step("a service of the primary (hostAccess: deny)", one.in()+"curl -s --max-time 2 http://"+hostAddr+":8080/", expect{fails: true, lacks: []string{"service"}})
	d.step("the metadata address, but for DNS", one.in()+"curl -s --max-time 2 http://"+metadataAddr+"/", expect{fails: true, lacks: []string{"hello"}})
	d.step("the address of somebody else", fmt.Sprintf("%sip addr add %s/32 dev lo && ! %sping -c2 -i0.2 -W1 -I %s %s; %sip addr del %s/32 dev lo",
		one.in(), two.addr, one.in(), two.addr, internetAddr, one.in(), two.addr), expect{has: []string{"100% packet loss"}})
	d.step("the pump dropped it and counted it", fmt.Sprintf("%s/mk-shim stats --endpoint %s", d.bin, one.gen), expect{has: []string{"source"}})
	d.step("and where a pump would not: raw PREROUTING drops it and counts it", fmt.Sprintf(
		"ip -n %s addr add %s/32 dev eth0; ip netns exec %s ping -c2 -i0.2 -W1 -I %s %s; ip -n %s addr del %s/32 dev eth0; iptables -t raw -L MK-%s -nvx",
		one.netns, two.addr, one.netns, two.addr, internetAddr, one.netns, two.addr, one.gen[:12]), expect{has: []string{"100% packet loss", " 2 "}, lacks: []string{" 0        0 DROP"}})
	d.step("an unsolicited packet from outside", "ip netns exec internet curl -s --max-time 2 http://"+one.addr+"/", expect{fails: true, lacks: []string{"here"}})
	return nil
}

// views shows where an operator looks.
func (d *demo) views() error {
	d.chapter("What an operator sees")
	one := d.children[0]
	d.step("links", "ip -br link; ip -n "+one.netns+" -br addr", expect{has: []string{"mkv" + one.gen[:11], "mkhost0", one.gw + "/30"}})
	d.step("routes", "ip route; ip -n "+one.netns+" route; ip -n "+one.netns+" rule", expect{has: []string{one.addr[:len(one.addr)-1]}})
	d.step("rules of one endpoint", "iptables -S | grep "+one.gen[:11]+"; iptables -t nat -S | grep "+one.gen[:11], expect{has: []string{"MASQUERADE", "MK-" + one.gen[:12]}})
	d.step("flows of one child", one.in()+"curl -s --max-time 10 http://"+internetAddr+"/ >/dev/null; conntrack -L -s "+one.addr, expect{has: []string{"src=" + one.addr, "dst=" + hostAddr}})
	d.step("every object beside its record", d.bin+"/mknetd inventory", expect{has: []string{one.gen[:12]}})
	return nil
}

// tearDown shows that DEL leaves nothing.
func (d *demo) tearDown() error {
	d.chapter("DEL")
	one, two := d.children[0], d.children[1]
	d.step("DEL while the shim lives is refused: try again", d.cni("del", one), expect{fails: true})
	for _, c := range d.children {
		if err := d.stop(c.shim); err != nil {
			d.verdict([]string{"mk-shim of " + c.name + ": " + err.Error()})
		}
	}
	if err := until(20*time.Second, func() error { return d.gone(one.addr) }); err != nil {
		d.verdict([]string{"the refused DEL did not complete by itself after UNBIND: " + err.Error()})
	}
	d.step("it completed by itself once the shim unbound; DEL again succeeds", d.cni("del", one), expect{})
	d.step("and again", d.cni("del", one), expect{})
	d.step("the other namespace disappears before its DEL", "ip netns del "+two.netns, expect{})
	d.step("DEL all the same", d.cni("del", two), expect{})
	d.step("no endpoint is left", d.bin+"/mknetd endpoints -o json", expect{has: []string{`"endpoints": []`}})
	d.step("no object is left", d.bin+"/mknetd inventory", expect{quiet: true, lacks: []string{one.gen[:12], two.gen[:12]}})
	d.step("nor in the kernel", "ip -o link; iptables-save; ip route; conntrack -L 2>/dev/null", expect{
		quiet: true, lacks: []string{one.gen[:11], two.gen[:11], "src=" + one.addr, "src=" + two.addr},
	})
	if err := d.stop(d.mknetd); err != nil {
		d.verdict([]string{"mknetd: " + err.Error()})
	}
	return nil
}

// gone reports an endpoint that still has the address.
func (d *demo) gone(addr string) error {
	out, err := d.quiet(d.bin + "/mknetd endpoints -o json")
	if err != nil {
		return err
	}
	if g := generationOf(out, addr); g != "" {
		return fmt.Errorf("endpoint %s is still there", g)
	}
	return nil
}
