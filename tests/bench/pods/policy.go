package pods

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// RuleCounts are how many rules apply to each direction of each pod.
var RuleCounts = []int{16, 128, 1024}

// Policers are the ways to enforce rules. Of all but ours the packets are routed by
// the kernel, established connections pass first, and what a pod sends and what it
// gets is looked up apart, as agents do that write such rules.
var policers = []struct {
	name   string
	list   func() map[string]any
	start  func(n *node) error
	enable func(n *node, rules int) error
}{
	{Ours, ours, startDaemon, applyACL},
	{"iptables", nil, nil, restoreIptables},
	{"nft", nil, nil, loadNft},
}

// PolicyKinds are the plain kernel, ours without a policy, and each policer with each
// number of rules: Policed names those.
var PolicyKinds = policyKinds()

// Policed is the name of the kind of a policer with so many rules.
func Policed(policer string, rules int) string { return fmt.Sprintf("%s-%d", policer, rules) }

// Policers are their names, ours first.
func Policers() (names []string) {
	for _, p := range policers {
		names = append(names, p.name)
	}
	return names
}

func policyKinds() []Kind {
	kinds := []Kind{{Name: Kernel}, {Name: Ours, list: ours, start: startDaemon}}
	for _, p := range policers {
		for _, rules := range RuleCounts {
			kinds = append(kinds, Kind{
				Name: Policed(p.name, rules), list: p.list, start: p.start,
				after: func(n *node) error { return p.enable(n, rules) },
			})
		}
	}
	return kinds
}

// rule number i allows connections with a few addresses and one port that nothing in
// the benchmark uses.
func rule(i int) (peer netip.Prefix, port int) {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16 + byte(i>>12), byte(i >> 4), byte(i << 4)}), 28), 10000 + i
}

// applyACL has mknetd enforce rules of both directions on all pods; only the last
// matches.
func applyACL(n *node, rules int) error {
	var b strings.Builder
	b.WriteString("apiVersion: mknet/v1\nkind: NetworkACL\nmetadata: {name: bench}\nspec:\n")
	for _, direction := range []string{"egress", "ingress"} {
		fmt.Fprintf(&b, "  %s:\n", direction)
		for i := range rules - 1 {
			peer, port := rule(i)
			fmt.Fprintf(&b, "  - {priority: %d, action: allow, protocol: tcp, cidr: %s, ports: [{port: %d}]}\n", i+1, peer, port)
		}
		fmt.Fprintf(&b, "  - {priority: %d, action: allow}\n", rules)
	}
	b.WriteString("---\napiVersion: mknet/v1\nkind: Attachment\nmetadata: {name: bench}\nspec: {networkACLRef: {name: bench}, pools: [pods]}\n")
	path := filepath.Join(n.dir, "policy.yaml")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		return err
	}
	return feed("", filepath.Join(n.bin, "mknetd"), "policy", "apply", "-f", path, "--config", filepath.Join(n.dir, "config.yaml"))
}

// restoreIptables makes the same of iptables' rules, one after the other.
func restoreIptables(_ *node, rules int) error {
	var b strings.Builder
	b.WriteString("*filter\n:FORWARD DROP [0:0]\n:EGRESS - [0:0]\n:INGRESS - [0:0]\n")
	b.WriteString("-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -j EGRESS\n-A FORWARD -j INGRESS\n")
	for i := range rules - 1 {
		peer, port := rule(i)
		fmt.Fprintf(&b, "-A EGRESS -d %s -p tcp -m tcp --dport %d -j RETURN\n", peer, port)
		fmt.Fprintf(&b, "-A INGRESS -s %s -p tcp -m tcp --dport %d -j ACCEPT\n", peer, port)
	}
	b.WriteString("-A EGRESS -j RETURN\n-A INGRESS -j ACCEPT\nCOMMIT\n")
	return feed(b.String(), "iptables-restore")
}

// loadNft makes the same of verdict maps whose keys are intervals, and of a rule for
// what they do not have.
func loadNft(_ *node, rules int) error {
	verdicts := func(verdict string) string {
		var b strings.Builder
		for i := range rules - 1 {
			peer, port := rule(i)
			fmt.Fprintf(&b, "\t\t\t%s . tcp . %d : %s,\n", peer, port, verdict)
		}
		return b.String()
	}
	const vmap = "\tmap %s {\n\t\ttype ipv4_addr . inet_proto . inet_service : verdict\n\t\tflags interval\n\t\telements = {\n%s\t\t}\n\t}\n"
	text := "table ip bench {\n" + fmt.Sprintf(vmap, "sent", verdicts("return")) + fmt.Sprintf(vmap, "got", verdicts("accept")) +
		"\tchain egress {\n\t\tip daddr . meta l4proto . th dport vmap @sent\n\t\treturn\n\t}\n" +
		"\tchain ingress {\n\t\tip saddr . meta l4proto . th dport vmap @got\n\t\taccept\n\t}\n" +
		"\tchain forward {\n\t\ttype filter hook forward priority filter; policy drop;\n\t\tct state established,related accept\n\t\tjump egress\n\t\tjump ingress\n\t}\n}\n"
	return feed(text, "nft", "-f", "-")
}

// feed runs a program with a text on its standard input.
func feed(text, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %.2000s", name, err, out)
	}
	return nil
}
