package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	specapi "mknet/spec/api"
)

const explainHelp = `Explain walks a packet through this node, and then its answer, as the kernel would
decide now: the pump, routes, links and rules of the namespaces, the programs of pods,
policy, every iptables table with the rules of the endpoint one by one, and translation.
Each station names the object, what decides, and a command that shows it.

` + endsHelp + `One of them must be an endpoint. With a port the packet is TCP unless --proto says udp;
without one it is an ICMP echo.

  mknetd explain --from 172.30.0.2 --to 198.51.100.1:443

It is the first packet of a new flow. With a source port (--from 172.30.0.2:40312; of
ICMP: the identifier) it is the next one of that flow, if it exists: connection tracking
comes first then, the kernel's and that of policy. With --size BYTES it has that length,
IP header included, and may not be cut, as TCP sends and ping -M do.

What lies in a child and beyond this host is not looked at. A rule that cannot be
judged makes the verdict "unknown" and is named.

Exit status: 0 it passes; 1 it does not, or nobody can tell; 2 wrong arguments; 3 no
mknetd answers; 4 mknetd refused.`

func (p *Program) explainCommand() *cobra.Command {
	var files configFlags
	form := output("table")
	var req specapi.WayRequest
	var all bool
	cmd := &cobra.Command{
		Use: "explain --from END[:PORT] --to END[:PORT]", Short: "say which way a packet takes, and what stops it", Args: cobra.NoArgs, Long: explainHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			x, err := c.Explain(cmd.Context(), req)
			if err != nil {
				return err
			}
			if err := p.print(form, x, func(w io.Writer) { showWay(w, x, all) }); err != nil {
				return err
			}
			if x.Verdict != specapi.Passes {
				return &exitError{status: ExitDiffers}
			}
			return nil
		},
	}
	files.register(cmd, false)
	cmd.Flags().StringVar(&req.From, "from", "", "who sends, with a port where one flow is meant")
	cmd.Flags().StringVar(&req.To, "to", "", "who is meant to get it, with a port")
	cmd.Flags().StringVar(&req.Protocol, "proto", "", "icmp, tcp or udp")
	cmd.Flags().IntVar(&req.SizeBytes, "size", 0, "length of the packet in bytes, IP header included")
	cmd.Flags().BoolVar(&all, "rules", false, "also show the rules that did not match")
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	for _, f := range []string{"from", "to"} {
		_ = cmd.MarkFlagRequired(f) // fails only for a flag that does not exist
	}
	return cmd
}

func showWay(w io.Writer, x specapi.Explanation, all bool) {
	port := ""
	if x.Port != 0 {
		port = fmt.Sprintf(" port %d", x.Port)
	}
	if x.SourcePort != 0 {
		port += fmt.Sprintf(" from port %d", x.SourcePort)
	}
	if x.SizeBytes != 0 {
		port += fmt.Sprintf(", %d bytes", x.SizeBytes)
	}
	fmt.Fprintf(w, "%s -> %s %s%s\n", x.From, x.To, x.Protocol, port)
	showSteps(w, x.Way, all)
	if len(x.Back) > 0 {
		fmt.Fprintln(w, "\nand its answer")
		showSteps(w, x.Back, all)
	}
	if len(x.Faults) > 0 {
		fmt.Fprintln(w, "\nnot as recorded, on the way or off it")
		for _, f := range x.Faults {
			fmt.Fprintf(w, "  %s\n      $ %s\n", f, f.Inspect)
		}
	}
	if len(x.NotJudged) > 0 {
		fmt.Fprintln(w, "\nnot judged, and may decide otherwise")
		for _, s := range x.NotJudged {
			fmt.Fprintf(w, "  %s (%s): %s\n", s.Object, s.Where, s.Why)
			if s.Inspect != "" {
				fmt.Fprintf(w, "      $ %s\n", s.Inspect)
			}
		}
	}
	fmt.Fprintf(w, "\n%s: %s\n", strings.ToUpper(string(x.Verdict)), x.Because)
}

// marks stand before a station: one look down the page finds what is wrong.
var marks = map[specapi.Outcome]string{specapi.Passes: "ok", specapi.Dropped: "DROP", specapi.Broken: "BROKEN", specapi.Unknown: "?"}

func showSteps(w io.Writer, steps []specapi.ExplainStep, all bool) {
	for _, s := range steps {
		fmt.Fprintf(w, "  %-6s %-9s  %s: %s\n", marks[s.Outcome], s.Where, s.Object, s.Why)
		for _, r := range s.Rules {
			if all || r.Matches != "no" {
				fmt.Fprintf(w, "           %s %d: %s  (%s)\n", r.Chain, r.Number, r.Text, r.Matches)
			}
		}
		if s.Inspect != "" {
			fmt.Fprintf(w, "           $ %s\n", s.Inspect)
		}
	}
}
