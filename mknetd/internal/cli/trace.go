package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	specapi "mknet/spec/api"
	"mknet/spec/policy"
)

const traceHelp = `Trace tells what becomes of the packets of a flow from now on, in both directions, at the
eBPF programs of this node: at both enforcement points, which rule of which policy let a
packet pass or dropped it, whether conntrack knew the flow, and where it went. What goes
through the host stack is followed through iptables: every rule that matched and every
chain's policy, with its verdict. A table ip mknet-trace-... marks the packets meanwhile
(at most 20 a second) and changes none; with the flavour legacy, counters of a child's
chains are shown instead, of all its flows. So are the drops of a child's pump. At the
foot is the verdict on the last packet.

` + endsHelp + `One of them must be an endpoint, and READY. With a port the protocol is TCP unless --proto
says otherwise; without one it is ICMP. A port of 0 is any port.

--probe sends one packet of the flow out of the pod --from: a SYN, a
datagram or an echo request. Without it, trace waits for others to send.

  mknetd trace --from default/web --to 10.88.0.3 --proto tcp --port 80 --probe

At most 16 traces run at once. One that nobody reads ends by itself, in the kernel too.
What a service address or a published port translates is told only where the addresses
are those of --from and --to.

Exit status: 0 the last packet passed; 1 it did not, or nobody can tell; 2 wrong
arguments; 3 no mknetd answers; 4 mknetd refused.`

// traceOutput is the value of trace's -o.
type traceOutput string

func (o *traceOutput) String() string { return string(*o) }
func (o *traceOutput) Type() string   { return "tree|json" }
func (o *traceOutput) Set(s string) error {
	if s != "tree" && s != "json" {
		return errors.New("must be tree or json")
	}
	*o = traceOutput(s)
	return nil
}

func (p *Program) traceCommand() *cobra.Command {
	var files configFlags
	form := traceOutput("tree")
	var req specapi.TraceRequest
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "trace --from END --to END[:PORT]", Short: "tell what becomes of the packets of a flow", Args: cobra.NoArgs, Long: traceHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout < time.Second || timeout%time.Second != 0 {
				return fmt.Errorf("--timeout %s: must be whole seconds, at least 1s", timeout)
			}
			req.TimeoutSeconds = int(timeout / time.Second)
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			show := (&traceTree{w: p.Stdout}).show
			if form == "json" {
				enc := json.NewEncoder(p.Stdout)
				show = func(l specapi.TraceLine) error { return enc.Encode(l) }
			}
			var verdict specapi.Outcome
			err = c.Trace(cmd.Context(), req, func(l specapi.TraceLine) error {
				if l.End != nil {
					verdict = l.End.Verdict
				}
				return show(l)
			})
			if err == nil && verdict != specapi.Passes {
				err = &exitError{status: ExitDiffers}
			}
			return err
		},
	}
	files.register(cmd, false)
	cmd.Flags().StringVar(&req.From, "from", "", "who sends")
	cmd.Flags().StringVar(&req.To, "to", "", "who is meant to get it")
	cmd.Flags().StringVar(&req.Protocol, "proto", "", "icmp, tcp, udp, sctp, gre, esp, ah or a number")
	cmd.Flags().Uint16Var(&req.Port, "port", 0, "port of --to; 0: any, or none")
	cmd.Flags().BoolVar(&req.Probe, "probe", false, "send one packet out of the pod --from")
	cmd.Flags().DurationVar(&timeout, "timeout", 10*time.Second, "how long to wait for packets, up to 10m")
	cmd.Flags().VarP(&form, "output", "o", "form of the output; json is one object a line")
	for _, f := range []string{"from", "to"} {
		_ = cmd.MarkFlagRequired(f) // fails only for a flag that does not exist
	}
	return cmd
}

// traceTree writes a trace as it comes, one block for each packet at a program.
type traceTree struct {
	w      io.Writer
	packet int // of the block that is open
}

func (t *traceTree) show(l specapi.TraceLine) (err error) {
	say := func(format string, args ...any) {
		if err == nil {
			_, err = fmt.Fprintf(t.w, format, args...)
		}
	}
	switch {
	case l.Begin != nil:
		port := ""
		if l.Begin.Port != 0 {
			port = fmt.Sprintf(" port %d", l.Begin.Port)
		}
		say("%s -> %s %s%s, on %s until %s\n", l.Begin.From, l.Begin.To, l.Begin.Protocol, port, l.Begin.Node, l.Begin.Until.Local().Format("15:04:05"))
	case l.Event != nil:
		ev := l.Event
		if ev.Packet != t.packet {
			t.packet = ev.Packet
			say("\n%s %s %s  packet %d%s  %s%s -> %s%s%s, %d bytes\n", ev.At.Local().Format("15:04:05.000000"), ev.Node, ev.Hook, ev.Packet, map[bool]string{true: ", an answer"}[ev.Reply],
				ev.Source, portText(ev.SourcePort), ev.Destination, portText(ev.DestinationPort), spaced(ev.TCPFlags), ev.Bytes)
		}
		by := spaced(ev.Policy) + spaced(ev.Rule)
		if ev.Chain != "" {
			by = " " + ev.Place()
		}
		say("  %s %d %s%s%s%s\n", branch(ev), ev.Code, ev.Name, where(ev), by, bracketed(ev.Outcome+ev.Verdict))
	case l.Note != nil:
		say("\n%s %s %s: %s\n", l.Note.At.Local().Format("15:04:05.000000"), l.Note.Node, l.Note.About, l.Note.Text)
	case l.End != nil:
		say("\n%s: %s\n", strings.ToUpper(string(l.End.Verdict)), l.End.Because)
		say("%d events", l.End.Events)
		if l.End.Lost > 0 {
			say(", %d more were lost: there was no room for them", l.End.Lost)
		}
		say("\n")
	}
	return err
}

// branch draws what ends a packet differently.
func branch(ev *specapi.TraceEvent) string {
	if ev.Code >= 500 || ev.Code == uint16(policy.FilterDrop) {
		return "`-"
	}
	return "|-"
}

func where(ev *specapi.TraceEvent) string {
	if ev.Point == "" {
		return ""
	}
	return " (" + ev.Point + " of " + ev.Endpoint.String() + ")"
}

func portText(port uint16) string {
	if port == 0 {
		return ""
	}
	return fmt.Sprintf(":%d", port)
}

func spaced(s string) string {
	if s == "" {
		return ""
	}
	return " " + s
}

func bracketed(s string) string {
	if s == "" {
		return ""
	}
	return " [" + s + "]"
}
