package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"mknet/mknetd/internal/conntrack"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/topo"
)

func checkConntrack(ctx context.Context, n *Node) []Finding {
	// The answer does not matter, that there is one does.
	if _, err := conntrack.Count(ctx, netip.AddrFrom4([4]byte{192, 0, 2, 1})); err != nil {
		return []Finding{{
			Severity: Error, What: fmt.Sprintf("connection tracking cannot be read: %v", err), Why: "every ADD and DEL forgets the flows of its address",
			Do: "modprobe nf_conntrack_netlink; run as root",
		}}
	}
	count, err1 := strconv.ParseUint(n.sysctl("net/netfilter/nf_conntrack_count"), 10, 64)
	limit, err2 := strconv.ParseUint(n.sysctl("net/netfilter/nf_conntrack_max"), 10, 64)
	if err1 != nil || err2 != nil || limit == 0 || count*10 < limit*9 {
		return nil
	}
	return []Finding{{
		Severity: Error, What: fmt.Sprintf("the connection tracking table has %d of %d entries", count, limit), Why: "a full table drops every new flow of the host",
		Do: "who fills it: conntrack -L | awk '{print $5}' | sort | uniq -c | sort -n | tail; make it larger: sysctl -w net.netfilter.nf_conntrack_max=" + strconv.FormatUint(2*limit, 10),
	}}
}

// flavours are the programs that print all rules of one flavour.
var flavours = map[string]string{"nft": "iptables-nft-save", "legacy": "iptables-legacy-save"}

// rules returns what a flavour holds, as iptables-save prints it.
func (n *Node) rules(ctx context.Context, flavour string) (string, error) {
	if flavour == "legacy" {
		// Asking would make the tables (net/ipv4/netfilter, iptable_*_table_init).
		names, err := os.ReadFile(n.proc() + "/thread-self/net/ip_tables_names")
		if err != nil || len(names) == 0 {
			return "", nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, flavours[flavour])
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", flavours[flavour], err)
	}
	return string(out), nil
}

// flavour is the one that mknetd uses, or would by the configuration; empty where
// only mknetd could say.
func (n *Node) flavour() string {
	if n.daemonErr == nil {
		return n.inForce.Firewall
	}
	if _, known := flavours[string(n.Config.Firewall)]; known {
		return string(n.Config.Firewall)
	}
	return ""
}

func countRules(text string) int { return strings.Count("\n"+text, "\n-A ") }

func checkIPTables(ctx context.Context, n *Node) []Finding {
	var found []Finding
	inUse := n.flavour()
	if inUse != "" {
		for _, name := range []string{"iptables-" + inUse, "iptables-" + inUse + "-restore", "iptables-" + inUse + "-save"} {
			if _, err := exec.LookPath(name); err != nil {
				if _, err := exec.LookPath(strings.Replace(name, "-"+inUse, "", 1)); err == nil {
					continue
				}
				found = append(found, Finding{Severity: Error, What: name + " is not installed", Why: "mknetd makes its rules with it", Do: "apt install iptables (1.8.0 or later), or the like"})
			}
		}
	}
	held := map[string]int{}
	for flavour := range flavours {
		text, err := n.rules(ctx, flavour)
		switch {
		case err == nil:
			held[flavour] = countRules(text)
			for _, table := range ipt.Incompatible(text) {
				if inUse == "legacy" {
					break
				}
				found = append(found, Finding{
					Severity: Error, What: (&ipt.IncompatibleError{Table: table}).Error(),
					Why: "where mknetd has rules in it, or had, it neither starts, compares nor repairs; explain knows no verdict",
					Do:  "nft list table ip " + table + "; move the rules that iptables-nft -t " + table + " -S does not know into a table of their own (nft add table ip local)",
				})
			}
		case !errors.Is(err, exec.ErrNotFound) && flavour == inUse:
			found = append(found, unlooked("iptables "+flavour, err)...)
		}
	}
	other := map[string]string{"nft": "legacy", "legacy": "nft"}[inUse]
	switch {
	case other != "" && held[other] > 0:
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("mknetd uses iptables %s, and iptables %s holds %d rules", inUse, other, held[other]),
			Why: "both judge every packet: what the other one drops, mknet cannot accept", Do: "look: " + flavours[other] + "; move those rules to " + inUse + ", or set firewall: " + other,
		})
	case inUse == "" && held["nft"] > 0 && held["legacy"] > 0:
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("iptables nft holds %d rules and iptables legacy %d", held["nft"], held["legacy"]),
			Why: "both judge every packet, and mknetd can use only one", Do: "move the rules of one to the other",
		})
	}
	return found
}

// judged are the hooks at which a packet of an endpoint can be dropped.
var judged = []string{"prerouting", "forward", "input", "postrouting"}

func checkBaseChains(ctx context.Context, n *Node) []Finding {
	var found []Finding
	overrules := func(chain, how, look string) {
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("base chain %s %s", chain, how),
			Why: "every base chain of a hook is asked: what this one drops, mknet's ACCEPT in another one does not let through. Packets of endpoints may be lost here",
			Do:  "allow them there too (FORWARD: interfaces mkv+ and lxc+, and the pools); look: " + look,
		})
	}
	chains, err := ipt.BaseChains()
	if err != nil {
		found = unlooked("nftables", err)
	}
	for _, c := range chains {
		if !slices.Contains(judged, c.Hook) || c.Family != "ip" && c.Family != "inet" {
			continue
		}
		look := fmt.Sprintf("nft list chain %s %s %s", c.Family, c.Table, c.Name)
		// ACCEPT in filter FORWARD and INPUT ends that very chain: our jumps are first in it.
		ours := n.flavour() != "legacy" && c.Family == "ip" && c.Table == "filter" && (c.Name == "FORWARD" || c.Name == "INPUT")
		switch {
		case c.Drops && !ours:
			overrules(c.String(), "has the policy drop", look)
		case c.TakesRest && !c.IPTables():
			overrules(c.String(), "has a rule that drops or rejects every packet that reaches it", look)
		}
	}
	text, err := n.rules(ctx, "legacy")
	if err != nil {
		return found
	}
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if name, is := strings.CutPrefix(line, "*"); is {
			table = name
		}
		w := strings.Fields(line)
		if len(w) < 2 || !strings.HasPrefix(w[0], ":") || w[1] != "DROP" {
			continue
		}
		chain := w[0][1:]
		if !slices.Contains(judged, strings.ToLower(chain)) || n.flavour() == "legacy" && table == "filter" {
			continue
		}
		overrules("legacy "+table+" "+chain, "has the policy DROP", "iptables-legacy -t "+table+" -S "+chain)
	}
	return found
}

// egress returns the interface that endpoints leave by, with why there is none.
func (n *Node) egress() (topo.Egress, *topo.Host, error) {
	host, err := topo.Open()
	if err != nil {
		return topo.Egress{}, nil, err
	}
	e, err := host.Egress(n.Config.Egress)
	return e, host, err
}

func checkForwarding(_ context.Context, n *Node) []Finding {
	e, host, err := n.egress()
	if host != nil {
		defer host.Close()
	}
	switch {
	case errors.Is(err, topo.ErrNoEgress):
		return []Finding{{
			Severity: Error, What: err.Error(), Why: "endpoints have no way out, and no ADD is accepted", Do: "ip route add default via ROUTER, or `egress: NAME` in " + n.ConfigAt,
		}}
	case err != nil:
		return unlooked("egress", err)
	}
	path := "net/ipv4/conf/" + e.Name + "/forwarding"
	if n.sysctl(path) != "0" {
		return nil
	}
	f := Finding{
		Severity: Note, What: "forwarding is off on the egress " + e.Name, Why: "mknetd switches it on with the first endpoint; replies are not forwarded without it", Do: "sysctl -w " + path + "=1",
	}
	if n.daemonErr != nil || n.health.Endpoints["READY"] > 0 {
		f.Severity = Error
		f.Why = "replies to endpoints come in there and are not forwarded; the next audit switches it on, who switches it off?"
	}
	if n.daemonErr != nil {
		f.Severity = Warning
	}
	return []Finding{f}
}

func checkRPFilter(_ context.Context, n *Node) []Finding {
	e, host, err := n.egress()
	if host != nil {
		defer host.Close()
	}
	if err != nil {
		return nil // that there is no egress is said elsewhere
	}
	if max(n.sysctl("net/ipv4/conf/all/rp_filter"), n.sysctl("net/ipv4/conf/"+e.Name+"/rp_filter")) != "1" {
		return nil
	}
	defaults, err := host.DefaultRoutes()
	if err != nil {
		return unlooked("routes", err)
	}
	if defaults < 2 {
		return nil
	}
	return []Finding{{
		Severity: Warning, What: fmt.Sprintf("rp_filter is strict on %s, and the host has %d default routes", e.Name, defaults),
		Why: "what comes in by another way than the one that the host would answer by is dropped, without a word", Do: "sysctl -w net/ipv4/conf/" + e.Name + "/rp_filter=2; nstat -az TcpExtIPReversePathFilter counts what it drops",
	}}
}

func checkOverlaps(_ context.Context, n *Node) []Finding {
	host, err := topo.Open()
	if err != nil {
		return unlooked("routes", err)
	}
	defer host.Close()
	ranges := []topo.Range{{Name: "child pool", Prefix: n.Config.Pools.Child}, {Name: "transit pool", Prefix: n.Config.Pools.Transit}}
	for _, p := range n.Config.PodPools {
		ranges = append(ranges, topo.Range{Name: "pool " + p.Name, Prefix: p.Prefix})
	}
	lines, err := host.Overlaps(ranges)
	if err != nil {
		return unlooked("routes", err)
	}
	var found []Finding
	for _, line := range lines {
		found = append(found, Finding{
			Severity: Error, What: line, Why: "packets for endpoints would go there, or the other way round: mknetd does not start with it, and refuses ADDs",
			Do: "remove it (ip route del, ip addr del), or configure another pool on an empty node",
		})
	}
	return found
}
