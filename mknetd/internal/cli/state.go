package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"mknet/mknetd/internal/config"
)

// State is what the state commands do. say gets one line for each thing found or
// done.
type State interface {
	// Check reads the whole store and says every fault; sound when there is none.
	Check(cfg config.Config, say func(string)) (sound bool, err error)
	// Export writes all that can be read as one JSON document; whole when nothing
	// had to be left out.
	Export(cfg config.Config, to io.Writer, say func(string)) (whole bool, err error)
	// Import makes a store of such a document.
	Import(cfg config.Config, from io.Reader, force bool, say func(string)) error
}

func (p *Program) stateCommand() *cobra.Command {
	group := &cobra.Command{
		Use: "state", Short: "check, save or restore the store while mknetd is stopped", RunE: needCommand,
		Long: "State works on the store of a mknetd that does not run; beside a running one it\nrefuses. A store that mknetd does not start with is checked, exported and imported:\n\n  mknetd state check\n  mknetd state export /root/state.json\n  mknetd state import --force /root/state.json\n" + exitHelp,
	}
	group.AddCommand(p.stateCheckCommand(), p.stateExportCommand(), p.stateImportCommand())
	return group
}

// notHad makes the error of a store that is in use, or there already, or not
// there, a refusal.
func notHad(err error) error { return &exitError{status: ExitRefused, err: err} }

func (p *Program) stateCheckCommand() *cobra.Command {
	var files configFlags
	cmd := &cobra.Command{
		Use: "check", Short: "name every fault of the store", Args: cobra.NoArgs,
		Long: "Check reads every page and record of the store, changes nothing, and prints each\nfault with its place in the file and its record.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			sound, err := p.State.Check(cfg, func(s string) { fmt.Fprintln(p.Stdout, s) })
			if err != nil {
				return notHad(err)
			}
			if !sound {
				return &exitError{status: ExitDiffers}
			}
			return nil
		},
	}
	files.register(cmd, true)
	return cmd
}

func (p *Program) stateExportCommand() *cobra.Command {
	var files configFlags
	cmd := &cobra.Command{
		Use: "export [FILE]", Short: "write all that can be read from the store as JSON", Args: cobra.MaximumNArgs(1),
		Long: "Export reads a store, sound or damaged, and writes what it holds to FILE, which must\nnot exist, or to standard output. What cannot be read is left out: it is named on\nstandard error and in the document, and the exit status is 1.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			to, done := p.Stdout, func() error { return nil }
			if len(args) == 1 {
				f, err := os.OpenFile(args[0], os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
				if err != nil {
					return err
				}
				to, done = f, func() error { return errors.Join(f.Sync(), f.Close()) }
			}
			whole, err := p.State.Export(cfg, to, func(s string) { fmt.Fprintln(p.Stderr, s) })
			if err = errors.Join(err, done()); err != nil {
				if len(args) == 1 {
					err = errors.Join(err, os.Remove(args[0]))
				}
				return notHad(err)
			}
			if !whole {
				return &exitError{status: ExitDiffers}
			}
			return nil
		},
	}
	files.register(cmd, true)
	return cmd
}

func (p *Program) stateImportCommand() *cobra.Command {
	var files configFlags
	var force bool
	cmd := &cobra.Command{
		Use: "import FILE", Short: "make a store of a document that export wrote", Args: cobra.ExactArgs(1),
		Long: "Import checks the document in FILE (- is standard input) and makes a fresh store of\nit. It does not replace a store unless --force is given, and then keeps the old file\nbeside the new one. Endpoints that are not in the document are removed from the\nkernel when mknetd starts.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			from := cmd.InOrStdin()
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				from = f
			}
			if err := p.State.Import(cfg, from, force, func(s string) { fmt.Fprintln(p.Stdout, s) }); err != nil {
				return notHad(err)
			}
			return nil
		},
	}
	files.register(cmd, true)
	cmd.Flags().BoolVar(&force, "force", false, "replace a store that is there, and keep a copy of it")
	return cmd
}
