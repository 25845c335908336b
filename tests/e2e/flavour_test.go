package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"mknet/spec/api"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// An administrator switches between the iptables flavours; no rule of the old one
// may stay to judge packets as well, and no foreign one may go.
func TestFlavourChange(t *testing.T) {
	for _, from := range []string{"legacy", "nft"} {
		t.Run("from "+from, func(t *testing.T) {
			n := node.New(t, "firewall: "+from)
			foreignRule(t, from, "-i", "nobody0", "-j", "ACCEPT")
			pod := netlab.New(t)
			ep := n.Add(t, "c1", pod, "eth0")
			child := n.Boot(t, ep, "g1")
			n.Stop(t)
			switchFlavour(t, n)
			n.Start(t)
			nothingOfOurs(t, from)
			netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
			if err := n.Check(t, ep); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			if got := n.Endpoint(t, ep.Generation); got == nil || got.Firewall == from {
				t.Errorf("the record is %+v, want the other flavour in it", got)
			}
			if err := child.StopShim(); err != nil {
				t.Error(err)
			}
			if err := n.Del(t, ep); err != nil {
				t.Error(err)
			}
		})
	}
}

// Without endpoints no record leads to the shared chains.
func TestFlavourChangeWithoutEndpoints(t *testing.T) {
	for _, from := range []string{"legacy", "nft"} {
		t.Run("from "+from, func(t *testing.T) {
			n := node.New(t, "firewall: "+from)
			foreignRule(t, from, "-i", "nobody0", "-j", "ACCEPT")
			n.Stop(t)
			switchFlavour(t, n)
			n.Start(t)
			nothingOfOurs(t, from)
		})
	}
}

// What cannot be removed at the switch is in health meanwhile, and an audit removes it
// when it can.
func TestFlavourChangeHeld(t *testing.T) {
	n := node.New(t, "firewall: legacy", "auditInterval: 1s")
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	n.Stop(t)
	switchFlavour(t, n)
	release := foreignRule(t, "legacy", "-i", "nobody0", "-j", "MKNET-FWD")
	n.Start(t)
	if left := causeOf(t, n, "firewall-left"); !strings.Contains(left, "-A FORWARD -i nobody0 -j MKNET-FWD") {
		t.Errorf("health names %q, want the rule that holds the chain", left)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	release()
	netlab.Eventually(t, node.Patience, func() error {
		if left := causeOf(t, n, "firewall-left"); left != "" {
			return errors.New(left)
		}
		return nil
	})
	nothingOfOurs(t, "legacy")
}

// A mknetd that is killed before the old rules go has built the new ones, and the next
// one finds the old ones.
func TestFlavourChangeInterrupted(t *testing.T) {
	n := node.New(t, "firewall: legacy")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	n.Stop(t)
	switchFlavour(t, n)
	env, tell := faultyTools(t, n, "iptables-legacy-restore")
	tell("fail")
	n.Start(t, env)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	for _, save := range []string{"iptables-nft-save", "iptables-legacy-save"} {
		if !strings.Contains(netlab.Run(t, save), ep.Chain) {
			t.Errorf("%s: no rules of the endpoint, and the old ones have not gone yet", save)
		}
	}
	if causeOf(t, n, "firewall-left") == "" {
		t.Error("health has no cause firewall-left")
	}
	n.Kill(t)
	n.Start(t)
	nothingOfOurs(t, "legacy")
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}

// Purge follows a switch that no mknetd has seen.
func TestPurgeAfterFlavourChange(t *testing.T) {
	for _, from := range []string{"legacy", "nft"} {
		t.Run("from "+from, func(t *testing.T) {
			n := node.New(t, "firewall: "+from)
			foreignRule(t, from, "-i", "nobody0", "-j", "ACCEPT")
			n.Add(t, "c1", netlab.New(t), "eth0")
			n.Stop(t)
			switchFlavour(t, n)
			out := netlab.Run(t, n.Daemon, "purge", "--config", n.Config, "--yes")
			if want := "everything in iptables " + from; !strings.Contains(out, want) {
				t.Errorf("purge says\n%s\nwant %q", out, want)
			}
			nothingOfOurs(t, "nft")
			nothingOfOurs(t, "legacy")
		})
	}
}

// switchFlavour configures the other flavour.
func switchFlavour(t *testing.T, n *node.Node) {
	t.Helper()
	text, err := os.ReadFile(n.Config)
	if err != nil {
		t.Fatal(err)
	}
	swapped := strings.NewReplacer("firewall: legacy", "firewall: nft", "firewall: nft", "firewall: legacy").Replace(string(text))
	if err := os.WriteFile(n.Config, []byte(swapped), 0o600); err != nil {
		t.Fatal(err)
	}
}

// foreignRule adds somebody's rule to FORWARD of a flavour, and checks that it stands
// when it is released, at the end of the test at the latest.
func foreignRule(t *testing.T, flavour string, words ...string) (release func()) {
	t.Helper()
	rule := func(op string) []string {
		return append([]string{"-w", fmt.Sprint(int(node.Patience.Seconds())), op, "FORWARD"}, words...)
	}
	netlab.Run(t, "iptables-"+flavour, rule("-A")...)
	released := false
	release = func() {
		if released {
			return
		}
		released = true
		if out, err := netlab.Try("iptables-"+flavour, rule("-D")...); err != nil {
			t.Errorf("the foreign rule %v is gone: %v\n%s", words, err, out)
		}
	}
	t.Cleanup(release)
	return release
}

var ours = regexp.MustCompile(`(?i)mk-|mknet`)

func nothingOfOurs(t *testing.T, flavour string) {
	t.Helper()
	var left []string
	for line := range strings.Lines(netlab.Run(t, "iptables-"+flavour+"-save")) {
		if ours.MatchString(line) {
			left = append(left, line)
		}
	}
	if len(left) > 0 {
		t.Errorf("%d lines of ours are left in iptables-%s, the first: %s", len(left), flavour, left[0])
	}
}

// causeOf is the message of one cause in the daemon's health, "" where it has none.
func causeOf(t *testing.T, n *node.Node, code string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()
	h, err := n.Client(t).Health(ctx)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(h.Causes, func(c api.HealthCause) bool { return c.Code == code })
	if i < 0 {
		return ""
	}
	return h.Causes[i].Message
}
