package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sort"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"mknet/shim/internal/carrier"
	"mknet/shim/internal/stats"
	"mknet/shim/session"
	"mknet/spec/endpoint"
)

// statsBudget bounds one look at a shim.
const statsBudget = 5 * time.Second

func tokenCommand() *cobra.Command {
	return &cobra.Command{
		Use: "token FILE", Short: "make a token file of 32 random bytes, mode 0400; a file that is there is left alone", Args: cobra.ExactArgs(1),
		RunE: action(func(_ *cobra.Command, args []string) error {
			err := session.CreateTokenFile(args[0], session.NewToken())
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("%w: %w (remove it first if it is not used)", errTokenFile, err)
			}
			if err != nil {
				return fmt.Errorf("%w: %w", errTokenFile, err)
			}
			return nil
		}),
	}
}

func statsCommand() *cobra.Command {
	var dir, gen, output string
	cmd := &cobra.Command{
		Use: "stats", Short: "show the live figures of running shims", Args: cobra.NoArgs,
		RunE: action(func(c *cobra.Command, _ []string) error { return showStats(c, dir, gen, output) }),
	}
	f := cmd.Flags()
	f.StringVar(&gen, "endpoint", "", "endpoint generation (default: all)")
	f.StringVar(&dir, "stats-dir", stats.DefaultDir, "where the shims show themselves")
	f.StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}

func showStats(c *cobra.Command, dir, gen, output string) error {
	if output != "table" && output != "json" {
		return &usageError{fmt.Errorf("--output %q: must be table or json", output)}
	}
	all, err := stats.List(dir)
	if err != nil {
		return err
	}
	if gen != "" {
		one, err := endpoint.ParseGeneration(gen)
		if err != nil {
			return &usageError{err}
		}
		all = []endpoint.Generation{one}
	}
	docs := []json.RawMessage{}
	var failed []error // one shim that hangs hides none of the others
	for _, g := range all {
		ctx, cancel := context.WithTimeout(context.Background(), statsBudget)
		doc, err := stats.Read(ctx, dir, g)
		cancel()
		if errors.Is(err, fs.ErrNotExist) && gen == "" {
			continue // the socket of a shim that was killed
		}
		var s carrier.Status
		if err == nil {
			if err = json.Unmarshal(doc, &s); err != nil {
				err = fmt.Errorf("endpoint %s: stats: %w", g, err)
			}
		}
		if err != nil {
			failed = append(failed, err)
			continue
		}
		docs = append(docs, doc)
		if output == "json" {
			continue
		}
		if len(docs) > 1 {
			c.Println()
		}
		if err := printStatus(c.OutOrStdout(), s); err != nil {
			return err
		}
	}
	if output == "json" {
		e := json.NewEncoder(c.OutOrStdout())
		e.SetIndent("", "  ")
		failed = append(failed, e.Encode(docs))
	}
	return errors.Join(failed...)
}

// printStatus is the table of one shim.
func printStatus(out io.Writer, s carrier.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name string, v any) {
		if fmt.Sprint(v) != "" {
			fmt.Fprintf(w, "%s\t%v\n", name, v)
		}
	}
	row("endpoint", s.Generation)
	row("sandbox", s.Sandbox)
	row("agent", s.Agent)
	row("state", fmt.Sprintf("%s for %s", s.State, time.Since(s.Since).Round(time.Second)))
	row("address", s.Address)
	row("mtu", s.MTUBytes)
	row("lanes", s.Lanes)
	row("offloads", s.Offloads)
	row("sealed", s.Sealed)
	row("last error", s.LastError)
	row("sessions", s.Counters.Sessions)
	row("from child", fmt.Sprintf("%d packets, %d bytes", s.Counters.RxPackets, s.Counters.RxBytes))
	row("to child", fmt.Sprintf("%d packets, %d bytes in %d batches", s.Counters.TxPackets, s.Counters.TxBytes, s.Counters.Batches))
	row("credit waits", s.Counters.CreditWaits)
	row("transport retries", s.Counters.TransportRetries)
	row("round trip", s.Counters.RTT)
	reasons := make([]string, 0, len(s.Counters.Drops))
	for reason := range s.Counters.Drops {
		reasons = append(reasons, reason)
	}
	sort.Strings(reasons)
	for _, reason := range reasons {
		row("dropped, "+reason, s.Counters.Drops[reason])
	}
	return w.Flush()
}
