package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

// output is the value of -o.
type output string

func (o *output) String() string { return string(*o) }
func (o *output) Type() string   { return "table|json|yaml" }
func (o *output) Set(s string) error {
	switch s {
	case "table", "json", "yaml":
		*o = output(s)
		return nil
	}
	return errors.New("must be table, json or yaml")
}

// print writes v as JSON or YAML, or calls table.
func (p *Program) print(o output, v any, table func(w io.Writer)) error {
	var text []byte
	var err error
	switch o {
	case "json":
		if text, err = json.MarshalIndent(v, "", "  "); err == nil {
			text = append(text, '\n')
		}
	case "yaml":
		text, err = yaml.Marshal(v)
	default:
		w := tabwriter.NewWriter(p.Stdout, 0, 0, 2, ' ', 0)
		table(w)
		return w.Flush()
	}
	if err != nil {
		return err
	}
	_, err = p.Stdout.Write(text)
	return err
}

func (p *Program) endpointsCommand() *cobra.Command {
	var files configFlags
	form := output("table")
	var filter client.Filter
	var state string
	cmd := &cobra.Command{
		Use: "endpoints [GENERATION]", Short: "list the endpoints, or show one", Args: cobra.MaximumNArgs(1),
		Long: "Endpoints shows what a running mknetd has. GENERATION may be shortened as long as\nit names one endpoint; the 12 digits of a chain or of this list always may be given.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			filter.State = endpoint.State(state)
			if len(args) == 1 {
				ep, err := find(cmd.Context(), c, args[0])
				if err != nil {
					return err
				}
				one := shown{Endpoint: ep}
				rep, err := c.Counters(cmd.Context(), ep.Generation)
				switch {
				case err == nil && len(rep.Path) > 0:
					one.Path, one.ReportedAt = rep.Path, &rep.ReportedAt
				case err == nil:
					one.Counters, one.ReportedAt = &rep.Counters, &rep.ReportedAt
				case specapi.CodeOf(err) != specapi.NotFound: // nobody has reported yet, or it was deleted just now
					return err
				}
				return p.print(form, one, func(w io.Writer) { one.show(w) })
			}
			list, err := c.Endpoints(cmd.Context(), filter)
			if err != nil {
				return err
			}
			return p.print(form, specapi.EndpointList{Endpoints: list}, func(w io.Writer) { listEndpoints(w, list) })
		},
	}
	files.register(cmd, false)
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	cmd.Flags().StringVar(&filter.Network, "network", "", "only those of this network")
	cmd.Flags().StringVar(&filter.ContainerID, "container-id", "", "only those of this container")
	cmd.Flags().StringVar(&filter.IfName, "if-name", "", "only those with this interface name")
	cmd.Flags().StringVar(&filter.SandboxID, "sandbox", "", "only those bound to this sandbox ID")
	cmd.Flags().StringVar(&state, "state", "", "only those in this state")
	return cmd
}

// shown is one endpoint with what its shims, or the programs of its data path, have
// carried.
type shown struct {
	endpoint.Endpoint
	Counters   *specapi.Counters   `json:"counters,omitempty"`
	Path       []specapi.PathCount `json:"path,omitempty"`
	ReportedAt *time.Time          `json:"countersReportedAt,omitempty"`
}

func (s shown) show(w io.Writer) {
	showEndpoint(w, s.Endpoint)
	row := func(name, format string, args ...any) { fmt.Fprintf(w, name+"\t"+format+"\n", args...) }
	for _, c := range s.Path {
		if c.Packets > 0 {
			row(c.Outcome, "%d packets, %d bytes", c.Packets, c.Bytes)
		}
	}
	if s.Counters == nil {
		return
	}
	row("from child", "%d packets, %d bytes", s.Counters.RxPackets, s.Counters.RxBytes)
	row("to child", "%d packets, %d bytes", s.Counters.TxPackets, s.Counters.TxBytes)
	for _, d := range s.Counters.Drops {
		row("  dropped", "%s: %d", d.Reason, d.Packets)
	}
	row("sessions", "%d", s.Counters.Sessions)
	row("round trip", "%s", time.Duration(s.Counters.RTTNanoseconds))
	row("reported", "%s", s.ReportedAt.Format("2006-01-02 15:04:05 MST"))
}

// find returns the one endpoint whose generation begins with the given digits.
func find(ctx context.Context, c *client.Client, digits string) (endpoint.Endpoint, error) {
	if gen, err := endpoint.ParseGeneration(digits); err == nil {
		return c.GetEndpoint(ctx, gen)
	}
	if strings.Trim(digits, "0123456789abcdef") != "" || len(digits) > 32 || digits == "" {
		return endpoint.Endpoint{}, fmt.Errorf("generation %q: must be up to 32 lower-case hexadecimal digits", digits)
	}
	list, err := c.Endpoints(ctx, client.Filter{})
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	var found []endpoint.Endpoint
	for _, ep := range list {
		if strings.HasPrefix(ep.Generation.String(), digits) {
			found = append(found, ep)
		}
	}
	switch len(found) {
	case 0:
		return endpoint.Endpoint{}, specapi.Errorf(specapi.NotFound, "generation %s: no such endpoint", digits)
	case 1:
		return found[0], nil
	}
	return endpoint.Endpoint{}, fmt.Errorf("generation %s: names %d endpoints, among them %s and %s", digits, len(found), found[0].Generation, found[1].Generation)
}

func listEndpoints(w io.Writer, list []endpoint.Endpoint) {
	fmt.Fprintln(w, "GENERATION\tSTATE\tNETWORK\tCONTAINER\tINTERFACE\tADDRESS\tSANDBOX")
	for _, ep := range list {
		sandbox := "-"
		if ep.Binding != nil {
			sandbox = ep.Binding.Sandbox.String()
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", ep.Generation.Short(), stateText(ep), ep.Network, ep.ContainerID, ep.IfName, ep.Address, sandbox)
	}
}

func stateText(ep endpoint.Endpoint) string {
	s := string(ep.State)
	if len(ep.Degraded) > 0 {
		s += ",degraded"
	}
	if ep.DeleteRequested != nil {
		s += ",delete-requested"
	}
	return s
}

// showEndpoint shows one endpoint with the names under which ip and iptables have
// its parts.
func showEndpoint(w io.Writer, ep endpoint.Endpoint) {
	row := func(name, format string, args ...any) { fmt.Fprintf(w, name+"\t"+format+"\n", args...) }
	row("generation", "%s", ep.Generation)
	row("attachment", "%s", ep.Attachment)
	row("state", "%s", stateText(ep))
	for _, d := range ep.Degraded {
		row("  degraded", "%s", d)
	}
	if ep.DeleteRequested != nil {
		row("delete requested", "%s", ep.DeleteRequested.Format("2006-01-02 15:04:05 MST"))
	}
	row("mode", "%s", ep.Mode)
	row("address", "%s (gateway %s, %s)", ep.Address, ep.Gateway, ep.Subnet)
	row("transit", "%s - %s", ep.TransitHost, ep.TransitPeer)
	row("mtu", "%d", ep.MTUBytes)
	row("namespace", "%s (cookie %d)", ep.Namespace.Path, ep.Namespace.Cookie)
	row("links", "%s (host) - %s (namespace)", ep.HostLink, ep.PeerLink)
	row("chain", "%s (%s)", ep.Chain, ep.Firewall)
	row("egress", "%s %s", ep.Egress, ep.EgressAddr)
	row("access", "host %s, pods %s", ep.HostAccess, ep.PodAccess)
	if b := ep.Binding; b != nil {
		row("sandbox", "%s since %s", b.Sandbox, b.BoundAt.Format("2006-01-02 15:04:05 MST"))
		if b.Shim != nil {
			row("shim", "%s (pid %d)", b.Shim.Comm, b.Shim.PID)
		}
	}
	row("created", "%s", ep.CreatedAt.Format("2006-01-02 15:04:05 MST"))
}

func (p *Program) inventoryCommand() *cobra.Command {
	var files configFlags
	form := output("table")
	cmd := &cobra.Command{
		Use: "inventory", Short: "list every kernel object of mknet beside its record", Args: cobra.NoArgs,
		Long: "Inventory compares the kernel with the records of a running mknetd. The exit status\nis 1 when an object is an orphan (no record asks for it), missing (a record asks for\nit) or altered.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			inv, err := c.Inventory(cmd.Context())
			if err != nil {
				return err
			}
			if err := p.print(form, inv, func(w io.Writer) { listInventory(w, inv) }); err != nil {
				return err
			}
			if !inv.Clean() {
				return &exitError{status: ExitDiffers}
			}
			return nil
		},
	}
	files.register(cmd, false)
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	return cmd
}

func listInventory(w io.Writer, inv specapi.Inventory) {
	fmt.Fprintln(w, "STATUS\tKIND\tOBJECT\tWHERE\tGENERATION\tPROBLEM")
	for _, it := range inv.Items {
		gen := "-"
		if !it.Generation.IsZero() {
			gen = it.Generation.Short()
		}
		problem := it.Problem
		if problem != "" && it.Inspect != "" {
			problem += " (" + it.Inspect + ")"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", it.Status, it.Kind, it.Object, it.Where, gen, problem)
	}
}

func (p *Program) bindCommand() *cobra.Command {
	var files configFlags
	var gen, netnsPath string
	var att endpoint.Attachment
	var sandbox endpoint.Sandbox
	cmd := &cobra.Command{
		Use: "bind", Short: "join an endpoint to a sandbox by hand", Args: cobra.NoArgs,
		Long: "Bind names the endpoint by --generation (which may be shortened), by --network,\n--container-id and --if-name, or by --netns. It prints the reply as JSON; its nonce is\nwhat `mk-shim run --bound` shows for the one ATTACH that it allows.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			req := specapi.BindRequest{Selector: specapi.Selector{Attachment: att, NetnsPath: netnsPath}, Sandbox: sandbox}
			if gen != "" {
				ep, err := find(cmd.Context(), c, gen)
				if err != nil {
					return err
				}
				req.Selector.Generation = ep.Generation
			}
			rep, err := bind(cmd.Context(), c, req, netnsPath)
			if err != nil {
				return err
			}
			return p.print("json", rep, nil)
		},
	}
	files.register(cmd, false)
	cmd.Flags().StringVar(&gen, "generation", "", "generation of the endpoint")
	cmd.Flags().StringVar(&att.Network, "network", "", "CNI network name")
	cmd.Flags().StringVar(&att.ContainerID, "container-id", "", "CNI container ID")
	cmd.Flags().StringVar(&att.IfName, "if-name", "", "CNI interface name")
	cmd.Flags().StringVar(&netnsPath, "netns", "", "path of the CNI namespace")
	cmd.Flags().StringVar(&sandbox.ID, "sandbox", "", "sandbox ID")
	cmd.Flags().StringVar(&sandbox.Generation, "sandbox-generation", "", "sandbox generation")
	for _, f := range []string{"sandbox", "sandbox-generation"} {
		_ = cmd.MarkFlagRequired(f) // fails only for a flag that does not exist
	}
	return cmd
}

// bind passes the namespace itself where it is named: its path may mean something
// else to the daemon, which may live in other mount and PID namespaces.
func bind(ctx context.Context, c *client.Client, req specapi.BindRequest, netnsPath string) (specapi.BindReply, error) {
	if netnsPath == "" {
		return c.Bind(ctx, req)
	}
	ns, err := os.Open(netnsPath)
	if err != nil {
		return specapi.BindReply{}, fmt.Errorf("namespace: %w", err)
	}
	defer ns.Close()
	return c.BindIn(ctx, req, ns)
}
