package ipt

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/coreos/go-iptables/iptables"
)

// detect chooses the flavour and finds its programs:
//
//  1. the one asked for;
//  2. the only one that is installed;
//  3. the only one that holds rules already (firewalld, Docker or kubelet chose it);
//  4. the one that the plain `iptables` command is, which is what an operator
//     will look with;
//  5. nft.
func detect(ctx context.Context, want string) (tools, error) {
	found := map[string]tools{}
	var missing error
	for _, flavour := range []string{NFT, Legacy} {
		t, err := findTools(ctx, flavour)
		if err != nil {
			missing = errors.Join(missing, err)
			continue
		}
		found[flavour] = t
	}
	switch want {
	case NFT, Legacy:
		if t, ok := found[want]; ok {
			return t, nil
		}
		return tools{}, fmt.Errorf("iptables flavour %s: %w", want, missing)
	case "":
	default:
		return tools{}, fmt.Errorf("iptables flavour %q: must be %q or %q", want, NFT, Legacy)
	}
	switch len(found) {
	case 0:
		return tools{}, fmt.Errorf("no usable iptables (install the package iptables, 1.8.0 or later): %w", missing)
	case 1:
		for _, t := range found {
			return t, nil
		}
	}
	inUse := map[string]bool{Legacy: legacyInUse() && holdsRules(ctx, found[Legacy]), NFT: nftHoldsRules()}
	if inUse[Legacy] != inUse[NFT] {
		if inUse[Legacy] {
			return found[Legacy], nil
		}
		return found[NFT], nil
	}
	if flavour, err := flavourOf(ctx, "iptables"); err == nil {
		return found[flavour], nil
	}
	return found[NFT], nil
}

// findTools finds the programs of one flavour, under their own names or, where
// those are not installed, behind the plain ones.
func findTools(ctx context.Context, flavour string) (tools, error) {
	base := "iptables-" + flavour
	if _, err := exec.LookPath(base); err != nil {
		base = "iptables"
		got, err := flavourOf(ctx, base)
		if err != nil {
			return tools{}, err
		}
		if got != flavour {
			return tools{}, fmt.Errorf("iptables-%s is not installed and iptables is of the flavour %s", flavour, got)
		}
	}
	t := tools{flavour: flavour}
	for _, p := range []struct {
		to   *string
		name string
	}{{&t.iptables, base}, {&t.restore, base + "-restore"}, {&t.save, base + "-save"}} {
		path, err := exec.LookPath(p.name)
		if err != nil {
			return tools{}, err
		}
		*p.to = path
	}
	// New only runs `--version`. go-iptables takes no context, so that all
	// other runs are this package's own.
	ipt, err := iptables.New(iptables.Path(t.iptables))
	if err != nil {
		return tools{}, fmt.Errorf("%s: %w", t.iptables, err)
	}
	major, minor, patch := ipt.GetIptablesVersion()
	if major < 1 || major == 1 && minor < 8 {
		return tools{}, fmt.Errorf("%s is version %d.%d.%d, 1.8.0 or later is needed", t.iptables, major, minor, patch)
	}
	return t, nil
}

// flavourOf asks a program what it is: 1.8 prints "(nf_tables)" or "(legacy)"
// behind its version, older ones are legacy and print nothing.
func flavourOf(ctx context.Context, name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	out, err := run(ctx, execTimeout, "", path, "--version")
	if err != nil {
		return "", err
	}
	if strings.Contains(out, "nf_tables") {
		return NFT, nil
	}
	return Legacy, nil
}

// legacyInUse reports whether this network namespace has legacy tables at all.
// Asking iptables-legacy would create them.
func legacyInUse() bool {
	names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	return err == nil && len(names) > 0
}

// holdsRules reports whether a flavour holds any rule.
func holdsRules(ctx context.Context, t tools) bool {
	out, err := run(ctx, execTimeout, "", t.save)
	if err != nil {
		return false
	}
	v := newView("")
	if v.parse(out) != nil {
		return false
	}
	for _, rules := range v.chains {
		if len(rules) > 0 {
			return true
		}
	}
	return false
}
