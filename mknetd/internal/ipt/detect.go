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
//
// Where none is asked for, and a program or the kernel does not answer, nothing is
// chosen: the other flavour would take every endpoint's rules away and build them anew.
func detect(ctx context.Context, want string) (tools, error) {
	found := map[string]tools{}
	var missing error
	for _, flavour := range []string{NFT, Legacy} {
		t, err := findTools(ctx, flavour)
		switch {
		case err == nil:
			found[flavour] = t
		case want == "" && !absent(err):
			return tools{}, undecided(err)
		default:
			missing = errors.Join(missing, err)
		}
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
	nft, err := nftHoldsRules()
	if err != nil {
		return tools{}, undecided(err)
	}
	legacy, err := legacyInUse()
	if err == nil && legacy {
		legacy, err = holdsRules(ctx, found[Legacy])
	}
	if err != nil {
		return tools{}, undecided(err)
	}
	switch {
	case legacy && !nft:
		return found[Legacy], nil
	case nft && !legacy:
		return found[NFT], nil
	}
	switch flavour, err := flavourOf(ctx, "iptables"); {
	case err == nil:
		return found[flavour], nil
	case !absent(err):
		return tools{}, undecided(err)
	}
	return found[NFT], nil
}

// errUnusable is returned, wrapped, for programs that are of another flavour or too
// old.
var errUnusable = errors.New("not usable")

// absent reports whether an error of findTools or flavourOf says that a flavour's
// programs are not there, and not that they did not answer.
func absent(err error) bool {
	return errors.Is(err, exec.ErrNotFound) || errors.Is(err, errUnusable)
}

// undecided says what to do where something that decides the flavour did not answer.
func undecided(err error) error {
	return fmt.Errorf("choose between iptables nft and legacy: %w (configure `firewall: nft` or `firewall: legacy`, whichever this node uses)", err)
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
			return tools{}, fmt.Errorf("%w: iptables-%s is not installed and iptables is of the flavour %s", errUnusable, flavour, got)
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
		return tools{}, fmt.Errorf("%w: %s is version %d.%d.%d, 1.8.0 or later is needed", errUnusable, t.iptables, major, minor, patch)
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
func legacyInUse() (bool, error) {
	names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	if errors.Is(err, os.ErrNotExist) { // the kernel has no ip_tables
		return false, nil
	}
	return len(names) > 0, err
}

// holdsRules reports whether a flavour holds any rule.
func holdsRules(ctx context.Context, t tools) (bool, error) {
	out, err := run(ctx, execTimeout, "", t.save)
	if err != nil {
		return false, err
	}
	v := newView("")
	if err := v.parse(out); err != nil {
		return false, fmt.Errorf("%s: %w", t.save, err)
	}
	for _, rules := range v.chains {
		if len(rules) > 0 {
			return true, nil
		}
	}
	return false, nil
}
