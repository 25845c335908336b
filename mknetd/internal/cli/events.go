package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	specapi "mknet/spec/api"
	"mknet/spec/client"
)

// followRetry is how often a daemon that is away is looked for.
const followRetry = 500 * time.Millisecond

func (p *Program) eventsCommand() *cobra.Command {
	var files configFlags
	form := output("table")
	var follow bool
	var digits string
	cmd := &cobra.Command{
		Use: "events", Short: "list what changed: kernel objects and endpoints, each change once", Args: cobra.NoArgs,
		Long: "Events shows what a running mknetd remembers: its last 8,192 events, since it began.\n" +
			"With --follow it goes on with every event as it happens, over a restart of mknetd too.\n" +
			"-o json prints one object a line. A follower that is too slow is told how many it missed.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			if form == "yaml" {
				return errors.New("--output: must be table or json")
			}
			show := func(ev specapi.Event) error {
				if ev.Kind != specapi.EventLost && !strings.HasPrefix(ev.Generation.String(), digits) {
					return nil
				}
				return p.printEvent(form, ev)
			}
			if follow {
				return p.follow(cmd.Context(), c, show)
			}
			list, err := c.Events(cmd.Context(), specapi.EventsAfter{})
			if err != nil {
				return err
			}
			if list.Lost > 0 {
				fmt.Fprintf(p.Stderr, "mknetd: %d older events are forgotten\n", list.Lost)
			}
			for _, ev := range list.Events {
				if err := show(ev); err != nil {
					return err
				}
			}
			return nil
		},
	}
	files.register(cmd, false)
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens from now on")
	cmd.Flags().StringVar(&digits, "generation", "", "only those of this endpoint (the first digits will do)")
	return cmd
}

// follow shows events until ctx ends. A daemon that goes away is waited for; one
// that was never there is an error.
func (p *Program) follow(ctx context.Context, c *client.Client, show func(specapi.Event) error) error {
	var after specapi.EventsAfter
	away := false
	for {
		err := c.Follow(ctx, after, func(ev specapi.Event) error {
			away = false
			if ev.Kind != specapi.EventLost {
				after = specapi.EventsAfter{Instance: ev.Instance, Seq: ev.Seq}
			}
			return show(ev)
		})
		if err == nil || !errors.Is(err, client.ErrUnreachable) || after.Instance == "" {
			return err
		}
		if !away {
			away = true
			fmt.Fprintln(p.Stderr, "mknetd: waiting for mknetd:", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(followRetry):
		}
	}
}

// printEvent writes one line.
func (p *Program) printEvent(o output, ev specapi.Event) error {
	if o == "json" {
		return json.NewEncoder(p.Stdout).Encode(ev)
	}
	_, err := io.WriteString(p.Stdout, eventLine(ev)+"\n")
	return err
}

// eventLine is an event for a person: when, whose, what.
func eventLine(ev specapi.Event) string {
	words := []string{ev.At.Local().Format("15:04:05.000")}
	whose := "-"
	if !ev.Generation.IsZero() {
		whose = ev.Generation.Short()
	}
	words = append(words, fmt.Sprintf("%-12s", whose), fmt.Sprintf("%-9s", ev.What))
	switch {
	case ev.Object != nil:
		words = append(words, ev.Object.Kind, ev.Object.Name, "("+ev.Object.Where+")")
	case ev.Kind == specapi.EventEndpoint:
		words = append(words, ev.Endpoint, string(ev.State))
	}
	if ev.Peer != nil {
		words = append(words, fmt.Sprintf("by %s (pid %d)", ev.Peer.Comm, ev.Peer.PID))
	}
	var more []string
	for name, value := range ev.Details {
		more = append(more, name+"="+value)
	}
	slices.Sort(more)
	return strings.Join(append(words, more...), " ")
}
