package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

const topHelp = `Top shows endpoints with their rates, the busiest first, and again every --interval
until it is interrupted. The first page has averages since each endpoint was made.

FROM is what the endpoint sent, TO what it got, in packets and bytes per second; DROPS is
how many of its packets were dropped, in all. Of a child they are what its shim reports
every few seconds, of a pod what the eBPF programs count: TO is then only what the host's
stack delivered, for a packet that is redirected counts at the pod that sent it. RTT is the last
round trip to the child. "-" means that nobody knows: no shim has reported, or no eBPF.
` + exitHelp

// topOrders are what --sort takes.
var topOrders = map[string]func(a, b topRow) int{
	"bytes":   func(a, b topRow) int { return cmp.Compare(b.fromBytes+b.toBytes, a.fromBytes+a.toBytes) },
	"packets": func(a, b topRow) int { return cmp.Compare(b.fromPackets+b.toPackets, a.fromPackets+a.toPackets) },
	"drops":   func(a, b topRow) int { return cmp.Compare(b.now.drops, a.now.drops) },
	"rtt":     func(a, b topRow) int { return cmp.Compare(b.now.rtt, a.now.rtt) },
	"state":   func(a, b topRow) int { return cmp.Compare(stateText(a.ep), stateText(b.ep)) },
	"name":    func(a, b topRow) int { return cmp.Compare(a.ep.Attachment.String(), b.ep.Attachment.String()) },
}

func (p *Program) topCommand() *cobra.Command {
	var files configFlags
	order := "bytes"
	interval := 2 * time.Second
	var pages, limit int
	cmd := &cobra.Command{
		Use: "top", Short: "show the endpoints with their rates, live", Args: cobra.NoArgs, Long: topHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if topOrders[order] == nil {
				return fmt.Errorf("--sort %q: must be bytes, packets, drops, rtt, state or name", order)
			}
			if interval < 100*time.Millisecond {
				return fmt.Errorf("--interval %s: must be at least 100ms", interval)
			}
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			t := top{c: c, before: map[endpoint.Generation]topRow{}}
			for page := 1; ; page++ {
				rows, err := t.look(cmd.Context())
				if err != nil {
					return err
				}
				slices.SortStableFunc(rows, topOrders[order])
				if err := p.showTop(rows, limit, pages != 1); err != nil {
					return err
				}
				if page == pages {
					return nil
				}
				select {
				case <-cmd.Context().Done():
					return nil
				case <-time.After(interval):
				}
			}
		},
	}
	files.register(cmd, false)
	cmd.Flags().StringVar(&order, "sort", order, "bytes, packets, drops, rtt, state or name")
	cmd.Flags().DurationVar(&interval, "interval", interval, "time between two pages")
	cmd.Flags().IntVar(&pages, "pages", 0, "end after so many pages; 0: never. One page does not clear the screen")
	cmd.Flags().IntVar(&limit, "limit", 40, "endpoints on a page; 0: all")
	return cmd
}

// carried is what an endpoint had carried at one moment.
type carried struct {
	at                        time.Time
	known                     bool
	fromPackets, fromBytes    uint64
	toPackets, toBytes, drops uint64
	rtt                       time.Duration
}

// topRow is one endpoint on a page; rates are per second.
type topRow struct {
	ep                                         endpoint.Endpoint
	now                                        carried
	fromPackets, fromBytes, toPackets, toBytes float64
}

type top struct {
	c      *client.Client
	before map[endpoint.Generation]topRow
}

// look reads every endpoint and compares it with the page before.
func (t *top) look(ctx context.Context) ([]topRow, error) {
	list, err := t.c.Endpoints(ctx, client.Filter{})
	if err != nil {
		return nil, err
	}
	now := map[endpoint.Generation]topRow{}
	rows := make([]topRow, 0, len(list))
	for _, ep := range list {
		rep, err := t.c.Counters(ctx, ep.Generation)
		if err != nil && specapi.CodeOf(err) != specapi.NotFound { // nobody has reported, or it was deleted just now
			return nil, err
		}
		r := topRow{ep: ep, now: carriedOf(rep, err == nil)}
		r.since(t.before[ep.Generation])
		now[ep.Generation] = r
		rows = append(rows, r)
	}
	t.before = now
	return rows, nil
}

// since makes the rates, from what the page before had, or since the endpoint was made.
func (r *topRow) since(before topRow) {
	then := before.now
	switch {
	case !r.now.known:
		return
	case !then.known:
		then = carried{at: r.ep.CreatedAt}
	case !r.now.at.After(then.at): // no new report: the last rates still hold
		r.fromPackets, r.fromBytes, r.toPackets, r.toBytes = before.fromPackets, before.fromBytes, before.toPackets, before.toBytes
		return
	}
	seconds := r.now.at.Sub(then.at).Seconds()
	if seconds <= 0 {
		return
	}
	rate := func(now, then uint64) float64 { return float64(now-min(then, now)) / seconds }
	r.fromPackets, r.fromBytes = rate(r.now.fromPackets, then.fromPackets), rate(r.now.fromBytes, then.fromBytes)
	r.toPackets, r.toBytes = rate(r.now.toPackets, then.toPackets), rate(r.now.toBytes, then.toBytes)
}

func carriedOf(rep specapi.CountersReply, known bool) carried {
	c := rep.Counters
	s := carried{
		at: rep.ReportedAt, known: known, fromPackets: c.RxPackets, fromBytes: c.RxBytes, toPackets: c.TxPackets, toBytes: c.TxBytes,
		rtt: time.Duration(c.RTTNanoseconds),
	}
	for _, d := range c.Drops {
		s.drops += d.Packets
	}
	for _, o := range rep.Path {
		switch {
		case strings.HasPrefix(o.Outcome, "drop"):
			s.drops += o.Packets
		case o.Outcome == "delivered":
			s.toPackets, s.toBytes = s.toPackets+o.Packets, s.toBytes+o.Bytes
		case o.Outcome == "peer" || o.Outcome == "redirect" || o.Outcome == "stack":
			s.fromPackets, s.fromBytes = s.fromPackets+o.Packets, s.fromBytes+o.Bytes
		}
	}
	return s
}

// clearScreen moves home and clears what is below (ECMA-48: CUP, ED).
const clearScreen = "\x1b[H\x1b[J"

func (p *Program) showTop(rows []topRow, limit int, live bool) error {
	if live {
		if _, err := io.WriteString(p.Stdout, clearScreen); err != nil {
			return err
		}
	}
	w := tabwriter.NewWriter(p.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "GENERATION\tSTATE\tENDPOINT\tADDRESS\tFROM pkt/s\tFROM B/s\tTO pkt/s\tTO B/s\tDROPS\tRTT\n")
	for i, r := range rows {
		if limit > 0 && i == limit {
			fmt.Fprintf(w, "and %d more\n", len(rows)-limit)
			break
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s", r.ep.Generation.Short(), stateText(r.ep), r.ep.Attachment, r.ep.Address)
		if !r.now.known {
			fmt.Fprint(w, "\t-\t-\t-\t-\t-\t-\n")
			continue
		}
		rtt := "-"
		if r.now.rtt > 0 {
			rtt = r.now.rtt.Round(time.Microsecond).String()
		}
		fmt.Fprintf(w, "\t%.0f\t%s\t%.0f\t%s\t%d\t%s\n", r.fromPackets, bytesText(r.fromBytes), r.toPackets, bytesText(r.toBytes), r.now.drops, rtt)
	}
	return w.Flush()
}

// bytesText is a number of bytes in three or four digits.
func bytesText(n float64) string {
	units := []string{"", "k", "M", "G", "T"}
	i := 0
	for n >= 10000 && i < len(units)-1 {
		n, i = n/1000, i+1
	}
	return fmt.Sprintf("%.0f%s", n, units[i])
}
