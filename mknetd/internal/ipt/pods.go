package ipt

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"mknet/spec/endpoint"
)

// Ordinary pods have no rules of their own. Their host veths are in a device
// group (endpoint.Endpoint.LinkGroup), whose low bits say what the pod may do, and
// a handful of shared rules match the group: a packet's cost, an ADD's and a DEL's
// are the same beside any number of pods, and a foreign link that is called lxcbr0
// is never meant.
const (
	podRoot = sharedPrefix + "PODS"  // in every table
	podIn   = sharedPrefix + "PODIN" // INPUT: from pods whose hostAccess is deny

	// noMasqMark is put on packets of pods that want no translation, in FORWARD, and
	// read in POSTROUTING, where rules cannot see the link that they came by. The bit
	// is none of kube-proxy's (0x4000, 0x8000) and portmap's (0x2000).
	noMasqMark = "0x1000/0x1000"
)

// Matches of the device group; iptables prints them in this form.
var (
	anyPod     = fmt.Sprintf("%#x/%#x", endpoint.PodGroup, endpoint.PodGroupMask)
	podReaches = withFlag(endpoint.PodGroupPodAccess)
	podDenied  = withFlag(endpoint.PodGroupHostDeny)
	podNoMasq  = withFlag(endpoint.PodGroupNoMasq)
)

func withFlag(flag uint32) string {
	return fmt.Sprintf("%#x/%#x", endpoint.PodGroup|flag, endpoint.PodGroupMask|flag)
}

// KnowPods tells which subnets pods that are translated have, before EnsureShared:
// from then on the shared parts include those of pods.
func (f *Firewall) KnowPods(subnets ...netip.Prefix) {
	f.podsMu.Lock()
	defer f.podsMu.Unlock()
	f.servesPods = true
	for _, p := range subnets {
		if !slices.Contains(f.masquerade, p) {
			f.masquerade = append(f.masquerade, p)
		}
	}
	slices.SortFunc(f.masquerade, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
}

// ServePods makes sure that the shared parts are there for a pod of the subnet; the
// zero prefix is for one that is not translated. It returns nil only once they have
// been made: who calls while another is at it makes sure of them too. All but the
// first pod of a subnet cost nothing.
func (f *Firewall) ServePods(ctx context.Context, subnet netip.Prefix) error {
	f.podsMu.Lock()
	served := f.served[subnet]
	f.podsMu.Unlock()
	if served {
		return nil
	}
	if subnet.IsValid() {
		f.KnowPods(subnet)
	} else {
		f.KnowPods()
	}
	return f.EnsureShared(ctx)
}

// known are the subnets of which the shared parts include rules: none without pods,
// else the zero prefix, which stands for the rules of all, and those translated.
// The number changes whenever one is forgotten.
func (f *Firewall) known() ([]netip.Prefix, uint64) {
	f.podsMu.Lock()
	defer f.podsMu.Unlock()
	if !f.servesPods {
		return nil, f.forgotten
	}
	return append([]netip.Prefix{{}}, f.masquerade...), f.forgotten
}

// ForgetPods removes the rules of a subnet that has no pod any more. No ServePods of
// the same subnet may run meanwhile.
func (f *Firewall) ForgetPods(ctx context.Context, subnet netip.Prefix) error {
	f.podsMu.Lock()
	i := slices.Index(f.masquerade, subnet)
	if i >= 0 {
		f.masquerade = slices.Delete(slices.Clone(f.masquerade), i, i+1)
		delete(f.served, subnet)
		f.forgotten++
	}
	f.podsMu.Unlock()
	if i < 0 {
		return nil
	}
	return f.EnsureShared(ctx)
}

// serve notes that the rules of the subnets have been made, unless one was forgotten
// since epoch: it may be among them.
func (f *Firewall) serve(subnets []netip.Prefix, epoch uint64) {
	f.podsMu.Lock()
	defer f.podsMu.Unlock()
	if f.forgotten != epoch {
		return
	}
	if f.served == nil {
		f.served = map[netip.Prefix]bool{}
	}
	for _, p := range subnets {
		f.served[p] = true
	}
}

// unserve notes that the rules are about to be removed.
func (f *Firewall) unserve() {
	f.podsMu.Lock()
	defer f.podsMu.Unlock()
	clear(f.served)
}

// sharedParts is everything shared in one table.
func (f *Firewall) sharedParts(table string) shared {
	s := sharedOf(f.trees(table))
	f.podsMu.Lock()
	defer f.podsMu.Unlock()
	if f.servesPods {
		f.addPods(table, f.masquerade, &s)
	}
	return s
}

// addPods adds the rules of pods. Their jumps come after those of children: what
// goes to a child is judged by the child's chain, and what comes from one too.
func (l layout) addPods(table string, masquerade []netip.Prefix, s *shared) {
	jump := func(base, match, to string) {
		s.jumps[base] = append(s.jumps[base], words("%s -j %s", match, to).marked(sharedMark))
	}
	chain := func(name string, rules ...rule) {
		s.chains = append(s.chains, name)
		s.ordered[name] = true
		for _, r := range rules {
			s.rules[name] = append(s.rules[name], r.marked(sharedMark))
		}
	}
	from, to := "-m devgroup --src-group ", "-m devgroup --dst-group "
	switch table {
	case tableRaw:
		// The route to a pod leads to its own link and no other, so that the reverse
		// path of its source address is exact.
		jump("PREROUTING", from+anyPod, podRoot)
		chain(podRoot, words("-m rpfilter --invert -j DROP"))
	case tableNAT:
		for _, p := range masquerade {
			jump("POSTROUTING", "-s "+p.String(), podRoot)
		}
		chain(podRoot,
			words("-d %s -j RETURN", l.pool),
			words("-d 224.0.0.0/4 -j RETURN"),
			words("%s%s -j RETURN", to, anyPod),
			words("-m mark --mark %s -j RETURN", noMasqMark),
			words("-j MASQUERADE"))
	case tableFilter, l.guard:
		guard := table == l.guard
		jump("FORWARD", from+anyPod, podRoot)
		if !guard {
			jump("FORWARD", to+anyPod, podRoot)
		}
		jump("INPUT", from+podDenied, podIn)
		var forward []rule
		for _, m := range l.metadata {
			forward = append(forward, words("%s%s -m conntrack --ctorigdst %s -j REJECT --reject-with icmp-port-unreachable", from, podDenied, m))
		}
		if guard {
			forward = append(forward, words("%s%s -j MARK --set-xmark %s", from, podNoMasq, noMasqMark))
		} else {
			forward = append(forward, words("-j ACCEPT"))
		}
		input := []rule{
			words("-m conntrack --ctstate RELATED,ESTABLISHED --ctdir REPLY -j ACCEPT"),
			words("-p icmp -m icmp --icmp-type 8 -j ACCEPT"),
			words("-j DROP"),
		}
		if guard {
			forward, input = guardRules(forward), guardRules(input)
		}
		chain(podRoot, forward...)
		chain(podIn, input...)
	}
}
