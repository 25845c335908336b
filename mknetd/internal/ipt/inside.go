package ipt

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"

	"mknet/mknetd/internal/netns"
)

// DumpIn is Dump and BaseChains of another namespace, where nothing is of ours.
func (f *Firewall) DumpIn(ctx context.Context, ns *netns.Namespace) (all []Saved, chains []BaseChain, err error) {
	inUse := map[string]bool{}
	err = ns.Do(func() (err error) {
		if inUse[Legacy], err = legacyInUse(); err != nil {
			return err
		}
		chains, err = BaseChains()
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("namespace %s: %w", ns, err)
	}
	inUse[NFT] = slices.ContainsFunc(chains, BaseChain.IPTables)
	for _, flavour := range []string{NFT, Legacy} {
		if !inUse[flavour] {
			continue
		}
		t := f.tools
		if flavour != f.flavour {
			if t, err = findTools(ctx, flavour); err != nil {
				return nil, nil, fmt.Errorf("namespace %s has rules of iptables %s: %w", ns, flavour, err)
			}
		}
		var out string
		err := untilCompatible(ctx, func() (err error) {
			if out, err = saveIn(ctx, ns, t.save); err != nil {
				return err
			}
			return whole(out, anyTable)
		})
		if err != nil {
			return nil, nil, fmt.Errorf("namespace %s: read iptables %s: %w", ns, flavour, err)
		}
		all = append(all, ParseSave(flavour, out)...)
	}
	return all, chains, nil
}

// saveIn runs a program of one of the host's files in a namespace and returns its
// output. Only its start needs the namespace, which a process inherits from the
// thread that starts it.
func saveIn(ctx context.Context, ns *netns.Namespace, program string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return "", err
	}
	if err := ns.Do(cmd.Start); err != nil {
		return "", err
	}
	// An error's text fits into the pipe.
	out, err := io.ReadAll(stdout)
	said, _ := io.ReadAll(stderr)
	if waitErr := cmd.Wait(); waitErr != nil {
		return "", fmt.Errorf("%s: %w: %s", program, waitErr, oneLine(string(said)))
	}
	return string(out), err
}
