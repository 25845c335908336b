package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"mknet/mknetd/internal/mapdump"
)

const dumpHelp = `Dump shows what a pinned map of the eBPF data path holds now. It opens the map by itself,
read-only, so that it works while no mknetd runs; only root may.

Each --filter is FIELD=VALUE, and an entry must match all of them. A value is an IPv4
address or prefix, a hardware address, a number, a label in any case (proto=TCP,
hook=INGRESS) or its number; of a field with flags, those that must be set (REPLY,ACK) or
NONE; of a generation its first digits; of a list one of its members. Filters that give
the whole key cost one look-up, however large the map is.

What is zero in maps of fixed size and in counters is left out. --inner GENERATION shows the
rules of one table of policy_small, policy_medium or policy_large.

  mknetd bpf list
  mknetd bpf dump endpoints --filter address=10.88.0.2
  mknetd bpf dump policy_conntrack --filter proto=tcp --filter hook=ingress --limit 20
  mknetd bpf dump policy_small --inner 7 --filter part=rule -o json

Exit status: 0 success; 2 wrong arguments; 4 the map is not there or cannot be read.`

func (p *Program) bpfCommand() *cobra.Command {
	group := &cobra.Command{Use: "bpf", Short: "look into the maps of the eBPF data path, also with mknetd down", RunE: needCommand}
	group.AddCommand(p.bpfListCommand(), p.bpfDumpCommand())
	return group
}

func (p *Program) bpfListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "list the maps and their fields", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return p.print("table", nil, func(w io.Writer) {
				fmt.Fprintln(w, "MAP\tWHAT\tFIELDS")
				for _, m := range mapdump.Maps() {
					fmt.Fprintf(w, "%s\t%s\t%s\n", m.Name, m.Doc, strings.Join(m.Names(), ","))
				}
			})
		},
	}
}

func (p *Program) bpfDumpCommand() *cobra.Command {
	var files configFlags
	form := output("table")
	var req mapdump.Request
	var generation uint32
	cmd := &cobra.Command{
		Use: "dump MAP", Short: "show the entries of a map", Long: dumpHelp,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return errors.New("dump needs the name of one map (see mknetd bpf list)")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			if req.Map = args[0]; cmd.Flags().Changed("inner") {
				req.Inner = &generation
			}
			d, err := mapdump.Read(p.MapDir(cfg), req)
			var wrong *mapdump.UsageError
			if err != nil && !errors.As(err, &wrong) {
				return &exitError{status: ExitRefused, err: err}
			}
			if err != nil {
				return err
			}
			if err := p.print(form, d, d.Table); err != nil {
				return err
			}
			if d.Limited && form == "table" {
				fmt.Fprintf(p.Stderr, "mknetd: there are more than the %d of --limit\n", req.Limit)
			}
			return nil
		},
	}
	files.register(cmd, true)
	cmd.Flags().StringArrayVar(&req.Filters, "filter", nil, "only entries with FIELD=VALUE; may be given several times")
	cmd.Flags().IntVar(&req.Limit, "limit", 0, "at most so many entries; 0: all")
	cmd.Flags().Uint32Var(&generation, "inner", 0, "show the rules of the table with this generation")
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	return cmd
}
