package datapath

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"mknet/mknetd/internal/enforcer"
	"mknet/mknetd/internal/mapdump"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
	"mknet/tests/netlab"
)

// livePolicy is a lab without frames of its own: endpoint i is the pod's.
func livePolicy(t *testing.T, d *Datapath, pods ...*livePod) *policyLab {
	t.Helper()
	l := &policyLab{t: t, d: d, pools: policy.Pools{"all": netip.MustParsePrefix("10.9.0.0/16")}, numbers: enforcer.Numbers{}}
	for _, p := range pods {
		l.eps = append(l.eps, p.Endpoint)
	}
	var err error
	if l.enforce, err = enforcer.Open(d.Policy(), l.pools); err != nil {
		t.Fatal(err)
	}
	return l
}

// dump reads a map and returns its entries as JSON has them.
func dump(t *testing.T, d *Datapath, req mapdump.Request) (mapdump.Dump, []map[string]any) {
	t.Helper()
	out, err := mapdump.Read(MapDir(d.cfg.Dir), req)
	if err != nil {
		t.Fatalf("%+v: %v", req, err)
	}
	var rows []map[string]any
	for _, e := range out.Entries {
		text, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		var row map[string]any
		if err := json.Unmarshal(text, &row); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		rows = append(rows, row)
	}
	return out, rows
}

// Every map, on live traffic, with every kind of filter; a filter that gives the
// whole key is one look-up.
func TestG3DumpOnLiveTraffic(t *testing.T) {
	netlab.Clean(t)
	d := open(t, Config{Attach: TCX})
	named := func(name string) func(*endpoint.Endpoint) {
		return func(ep *endpoint.Endpoint) { ep.ContainerID = name }
	}
	a, b := startPodAs(t, d, 10, 1500, named("ep0")), startPodAs(t, d, 20, 1500, named("ep1"))
	l := livePolicy(t, d, a, b)
	l.apply(documents(t, `
		acl wall {egress: [{priority: 5, action: allow, protocol: tcp, cidr: 10.9.0.0/16, ports: [{port: 7}]}, {priority: 6, action: allow, protocol: udp}], ingress: []}
		sg server {ingress: [{from: [{securityGroupRef: {name: client}}], protocol: all}]}
		sg client {}
		at wall {networkACLRef: {name: wall}, subnets: [10.9.0.10/32]}
		at server {securityGroupRefs: [{name: server}], endpoints: [{name: ep1}]}
		at client {securityGroupRefs: [{name: client}], endpoints: [{name: ep0}]}`))
	b.serve(t, 7)
	b.serve(t, 9)
	tr, err := d.Trace(TraceFilter{To: b.Address, Port: 7, Protocol: protoTCP}, patience)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	conn := a.dial(t, "tcp", b.Address, 7)
	defer conn.Close()
	echo(t, conn, 100)
	a.echo(t, "udp", b.Address, 9, 3000)
	if n := a.ping(t, b.Address, 1, "-W1"); n != 0 {
		t.Errorf("%d pings answered, which the ACL denies", n)
	}
	wall, client := l.number("wall"), l.number("client")
	sport := netip.MustParseAddrPort(conn.LocalAddr().String()).Port()
	podMAC := mac(a.Generation.PeerMAC())
	from, to := fmt.Sprint("saddr=", a.Address), fmt.Sprint("daddr=", b.Address)
	both := keyOf(protoTCP, a.Address, b.Address, sport, 7)
	first, second := netip.AddrFrom4(both.Address[0]), netip.AddrFrom4(both.Address[1])
	p1, p2 := uint16(both.Port[0][0])<<8|uint16(both.Port[0][1]), uint16(both.Port[1][0])<<8|uint16(both.Port[1][1])
	for _, c := range []struct {
		of     string
		filter []string
		byKey  bool
		rows   int // -1: at least one
		want   map[string]string
	}{
		{"endpoints", nil, false, 2, nil},
		{"endpoints", []string{fmt.Sprint("address=", a.Address)}, true, 1, map[string]string{"pod_mac": podMAC, "generation": a.Generation.String()[:16], "mtu": "1500", "flags": "[]"}},
		{"endpoints", []string{"pod_mac=" + strings.ToUpper(podMAC)}, false, 1, map[string]string{"address": a.Address.String()}},
		{"endpoints", []string{"generation=" + b.Generation.Short()}, false, 1, map[string]string{"address": b.Address.String()}},
		{"endpoints", []string{"address=10.9.0.16/28", "mtu=0x5dc"}, false, 1, map[string]string{"address": b.Address.String()}},
		{"endpoints", []string{"address=10.9.0.99"}, true, 0, nil},
		{"attachments", []string{"link=" + a.HostLink}, false, 1, map[string]string{"address": a.Address.String()}},
		{"attachments", []string{fmt.Sprint("ifindex=", indexOf(t, d, b.HostLink))}, true, 1, map[string]string{"link": b.HostLink}},
		{"counts", []string{fmt.Sprint("address=", a.Address), "outcome=peer"}, true, 1, map[string]string{"outcome": "peer"}},
		{"counts", []string{"outcome=drop-acl"}, false, 1, map[string]string{"address": a.Address.String(), "packets": "1"}},
		{"flows", []string{"port=7", "path=redirect"}, false, 1, map[string]string{"proto": "TCP"}},
		{"flows", []string{fmt.Sprint("address1=", first), fmt.Sprint("address2=", second), fmt.Sprint("port1=", p1), fmt.Sprint("port2=", p2), "proto=6"}, true, 1, map[string]string{"path": "REDIRECT"}},
		{"policy_points", []string{"flags=attached,egress", fmt.Sprint("acl=", wall)}, false, 1, map[string]string{"address": a.Address.String(), "acl": fmt.Sprint(wall)}},
		{"policy_points", []string{fmt.Sprint("groups=", client)}, false, 1, map[string]string{"address": a.Address.String()}},
		{"policy_identity", []string{fmt.Sprint("address=", a.Address)}, true, 1, map[string]string{"groups": fmt.Sprintf("[%d]", client)}},
		{"policy_slots", []string{fmt.Sprint("policy=", wall), "direction=EGRESS"}, true, 1, map[string]string{"class": "SMALL", "flags": "[VALID RESTRICTS]"}},
		{"policy_slots", []string{"direction=1", "class=none"}, false, -1, map[string]string{"direction": "INGRESS"}},
		{"policy_small", []string{fmt.Sprint("policy=", wall), "kind=ACL"}, false, 1, map[string]string{"direction": "EGRESS", "rules": "2", "no_match": "1"}},
		{"policy_medium", nil, false, 0, nil},
		{"policy_large", nil, false, 0, nil},
		{"policy_conntrack", []string{"proto=TCP"}, false, 4, nil},
		{"policy_conntrack", []string{"proto=tcp", "hook=INGRESS", "flags=REPLY"}, false, 1, map[string]string{"saddr": b.Address.String(), "sport": "7", "state": "ESTABLISHED"}},
		{"policy_conntrack", []string{"proto=6", "hook=1", from, to, fmt.Sprint("sport=", sport), "dport=7"}, true, 1, map[string]string{"hook": "EGRESS", "state": "ESTABLISHED"}},
		{"policy_conntrack", []string{"proto=TCP", "hook=1", from, to, fmt.Sprint("sport=", sport), "dport=7", "state=NEW"}, true, 0, nil},
		{"policy_conntrack", []string{"address=10.9.0.0/16", "port=9", "proto=udp"}, false, 4, nil},
		{"policy_fragments", []string{"proto=UDP", from}, false, 1, map[string]string{"dport": "9"}},
		{"policy_reasons", []string{"reason=301"}, true, 1, map[string]string{"name": "acl drop", "packets": "1"}},
		{"policy_reasons", []string{"name=ACL drop"}, true, 1, map[string]string{"reason": "301"}},
		{"policy_reasons", []string{"packets=1"}, false, -1, nil},
		{"policy_scratch", []string{"cpu=0"}, true, 1, nil},
		{"trace_until", nil, true, 1, nil},
		{"trace_sessions", []string{fmt.Sprint("to=", b.Address), "port=7", "proto=TCP"}, false, 1, map[string]string{"from": "0.0.0.0", "session": "0"}},
		{"trace_packets", []string{"cpu=0"}, true, 1, map[string]string{"lost": "0"}},
	} {
		out, rows := dump(t, d, mapdump.Request{Map: c.of, Filters: c.filter})
		if c.byKey != (out.Lookups == 1 && out.Read == 0) || !c.byKey && out.Lookups != 0 {
			t.Errorf("%s %v: %d look-ups and %d entries read; the whole key is given: %t", c.of, c.filter, out.Lookups, out.Read, c.byKey)
		}
		if c.rows >= 0 && len(rows) != c.rows || c.rows < 0 && len(rows) == 0 {
			t.Errorf("%s %v: %d entries, want %d: %v", c.of, c.filter, len(rows), c.rows, rows)
			continue
		}
		for field, want := range c.want {
			if got := fmt.Sprint(rows[0][field]); got != want {
				t.Errorf("%s %v: %s is %s, want %s", c.of, c.filter, field, got, want)
			}
		}
	}
	_, slots := dump(t, d, mapdump.Request{Map: "policy_slots", Filters: []string{fmt.Sprint("policy=", wall), "direction=egress"}})
	generation := uint32(slots[0]["generation"].(float64))
	_, rules := dump(t, d, mapdump.Request{Map: "policy_small", Inner: &generation, Filters: []string{"part=rule"}})
	if len(rules) != 2 || rules[0]["action"] != "allow" || rules[0]["hits"].(float64) < 1 || rules[1]["hits"].(float64) < 1 {
		t.Errorf("rules of the ACL: %v", rules)
	}
	_, ports := dump(t, d, mapdump.Request{Map: "policy_small", Inner: &generation, Filters: []string{"part=port", "from=tcp/7"}})
	if len(ports) != 1 || fmt.Sprint(ports[0]["rules"]) != "[0]" {
		t.Errorf("ports of the ACL: %v", ports)
	}
	none := generation + 1000
	_, err = mapdump.Read(MapDir(d.cfg.Dir), mapdump.Request{Map: "policy_small", Inner: &none})
	if err == nil || !strings.Contains(err.Error(), "there is no such table; there are ") {
		t.Errorf("a generation that is not: %v", err)
	}
	limited, rows := dump(t, d, mapdump.Request{Map: "policy_conntrack", Limit: 3})
	if len(rows) != 3 || !limited.Limited {
		t.Errorf("limit 3: %d entries, more: %t", len(rows), limited.Limited)
	}
}

// A data path that nobody has used is empty, and one that was purged is absent.
func TestDumpOfNothing(t *testing.T) {
	d := open(t, Config{})
	for _, m := range mapdump.Maps() {
		if m.Name == "trace_events" {
			continue // a buffer
		}
		if out, rows := dump(t, d, mapdump.Request{Map: m.Name}); len(rows) != 0 && m.Name != "policy_scratch" && m.Name != "trace_packets" {
			t.Errorf("%s: %v", m.Name, out)
		}
	}
	_, err := mapdump.Read(MapDir(d.cfg.Dir)+"-none", mapdump.Request{Map: "endpoints"})
	var absent *mapdump.AbsentError
	if !errors.As(err, &absent) || !absent.NoDir {
		t.Errorf("a folder that is not: %v", err)
	}
}
