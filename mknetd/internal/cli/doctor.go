package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/doctor"
)

// Exit statuses of the doctor beside those of every command.
const (
	ExitWarnings = 5
	ExitErrors   = 6
)

const doctorHelp = `Doctor looks at kernel, configuration, sockets, permissions, firewall, pools, deferred
DELs, kernel objects and the CNI side, and says of each finding why it matters and what
to do. It changes nothing and works with mknetd down.

With --bundle it also writes a gzipped tar for somebody who cannot log in: the report,
configuration, CNI networks, records, metrics, events and the kernel's tables. Values
of keys that look like a secret are left out; read it before you send it.

Exit status: 0 nothing, or notes only; 5 warnings; 6 errors; 2 wrong arguments.`

func (p *Program) doctorCommand() *cobra.Command {
	var files configFlags
	form := output("table")
	var only []string
	var bundle string
	var list bool
	n := &doctor.Node{Version: p.Version}
	cmd := &cobra.Command{
		Use: "doctor", Short: "look for what is wrong with this node, and say what to do", Args: cobra.NoArgs, Long: doctorHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if list {
				return p.print(form, doctor.Checks(), func(w io.Writer) {
					for _, c := range doctor.Checks() {
						fmt.Fprintf(w, "%s\t%s\n", c.Name, c.About)
					}
				})
			}
			n.ConfigAt = files.path
			if n.Config, n.ConfigErr = files.load(cmd); n.ConfigErr != nil {
				if n.Config, _ = config.Load("", false); n.Config.Socket == "" {
					return n.ConfigErr
				}
			}
			defer n.Close()
			r, err := n.Run(cmd.Context(), only...)
			if err != nil {
				return err
			}
			if bundle != "" {
				if err := writeBundle(cmd, n, bundle, r); err != nil {
					return &exitError{status: ExitErrors, err: err}
				}
				fmt.Fprintln(p.Stderr, "mknetd: wrote", bundle)
			}
			if err := p.print(form, r, func(w io.Writer) { showReport(w, r) }); err != nil {
				return err
			}
			switch r.Worst() {
			case doctor.Error:
				return &exitError{status: ExitErrors}
			case doctor.Warning:
				return &exitError{status: ExitWarnings}
			}
			return nil
		},
	}
	files.register(cmd, false)
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	cmd.Flags().StringSliceVar(&only, "check", nil, "run only these checks")
	cmd.Flags().BoolVar(&list, "list", false, "list the checks and run none")
	cmd.Flags().StringVar(&bundle, "bundle", "", "also write a gzipped tar of report, records and tables to this new file")
	cmd.Flags().StringVar(&n.CNIConfDir, "cni-conf-dir", "", "folder of CNI networks (default /etc/cni/net.d)")
	cmd.Flags().StringSliceVar(&n.CNIBinDirs, "cni-bin-dir", nil, "folders of CNI plugins (default /opt/cni/bin, /usr/lib/cni, /usr/libexec/cni)")
	return cmd
}

// writeBundle makes the file, which must not exist: root writes no file that
// somebody has put there.
func writeBundle(cmd *cobra.Command, n *doctor.Node, path string, r doctor.Report) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if err := n.Bundle(cmd.Context(), f, r); err != nil {
		return errors.Join(fmt.Errorf("bundle %s: %w", path, err), f.Close())
	}
	return f.Close()
}

func showReport(w io.Writer, r doctor.Report) {
	fmt.Fprintf(w, "mknet %s, kernel %s, mknetd %s: %d checks\n", r.Version, r.Kernel, r.Daemon, len(r.Checks))
	count := map[doctor.Severity]int{}
	for _, f := range r.Findings {
		count[f.Severity]++
		fmt.Fprintf(w, "\n%s: %s (%s)\n  why: %s\n  do:  %s\n", strings.ToUpper(string(f.Severity)), f.What, f.Check, f.Why, f.Do)
	}
	fmt.Fprintf(w, "\n%d errors, %d warnings, %d notes\n", count[doctor.Error], count[doctor.Warning], count[doctor.Note])
}
