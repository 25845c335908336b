// Package cli is mknetd's command line: `serve` runs the daemon, the other
// commands ask a running one or look at its configuration. It knows no kernel
// object: main hands in what builds the engine.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"mknet/mknetd/internal/api"
	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/metrics"
	specapi "mknet/spec/api"
	"mknet/spec/client"
)

// Exit statuses, the same for every command.
const (
	ExitOK          = 0
	ExitDiffers     = 1 // inventory, state, verifier-check: something is orphaned, missing, altered, damaged or too dear; serve: the daemon failed
	ExitUsage       = 2 // wrong arguments or configuration
	ExitUnreachable = 3 // no mknetd answers
	ExitRefused     = 4 // mknetd answered with an error, or state cannot be had beside it
)

const exitHelp = `
Exit status: 0 success; 1 inventory found a difference, state a damage, or the daemon
failed; 2 wrong arguments or configuration; 3 no mknetd answers; 4 mknetd refused.`

// endsHelp says what --from and --to are, of each command that has them
// (spec/operations.md, "Who is meant").
const endsHelp = `--from and --to say whom: an IPv4 address, or an endpoint of this node by NAMESPACE/NAME
of its pod, container ID, the first 4 or more digits of its generation, or
NETWORK/CONTAINER/INTERFACE. A port stands behind a colon. A text that can mean nobody, or
means several, is refused with INVALID_ARGUMENT, a name that nobody has with NOT_FOUND.
`

// Daemon is a running engine with everything that it needs. Close is called once,
// after the last call has ended.
type Daemon interface {
	api.Engine
	metrics.Source
	Close() error
}

// Program is what main hands in.
type Program struct {
	Version string
	// Start builds the engine and brings kernel and records into agreement. It
	// returns once calls may be served. storeWait is how long another mknetd that has the
	// store may take to let go of it; 0: one that is not ending is not waited for.
	Start func(ctx context.Context, cfg config.Config, log *slog.Logger, storeWait time.Duration) (Daemon, error)
	// Purge removes everything of ours from the node and calls say with each thing
	// removed. nil: there is no such command.
	Purge func(ctx context.Context, cfg config.Config, log *slog.Logger, say func(string)) error
	// State works on the store while no daemon runs. nil: there are no such commands.
	State State
	// Verifier loads the eBPF programs for their cost. nil: there is no such command.
	Verifier func() ([]VerifierCost, error)
	// MapDir is where the data path pins its maps. nil: there are no such commands.
	MapDir func(cfg config.Config) string

	Stdout, Stderr io.Writer
}

// exitError carries the status of a command that has already said what is wrong,
// or whose error decides the status.
type exitError struct {
	status int
	err    error // nil: nothing more to say
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.status)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// Run runs one command and returns the exit status.
func (p *Program) Run(ctx context.Context, args []string) int {
	root := &cobra.Command{
		Use:           "mknetd",
		Short:         "the network of a multikernel host: owns its kernel objects, records and addresses",
		Long:          "mknetd owns every network object that mknet makes in the primary kernel, and the\ndurable record of each. mk-cni, runtimes and operators ask it over its socket.\n" + exitHelp,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          needCommand,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetArgs(args)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	root.AddCommand(p.serveCommand(), p.endpointsCommand(), p.inventoryCommand(), p.eventsCommand(), p.doctorCommand(), p.explainCommand(), p.traceCommand(), p.topCommand(), p.bindCommand(), p.policyCommand(), p.versionCommand(), p.configCommand())
	if p.Purge != nil {
		root.AddCommand(p.purgeCommand())
	}
	if p.State != nil {
		root.AddCommand(p.stateCommand())
	}
	if p.Verifier != nil {
		root.AddCommand(p.verifierCommand())
	}
	if p.MapDir != nil {
		root.AddCommand(p.bpfCommand())
	}
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	var exit *exitError
	if !errors.As(err, &exit) || exit.err != nil {
		fmt.Fprintln(p.Stderr, "mknetd:", err)
	}
	return status(err)
}

// needCommand is what a command with subcommands does when none of them is meant.
func needCommand(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unknown command %q (see %s --help)", args[0], cmd.CommandPath())
	}
	return fmt.Errorf("a command is needed (see %s --help)", cmd.CommandPath())
}

// status is the one place where an error becomes an exit status.
func status(err error) int {
	var (
		exit    *exitError
		refused *specapi.Error
		bad     *client.ReplyError
	)
	switch {
	case errors.As(err, &exit):
		return exit.status
	case errors.As(err, &refused), errors.As(err, &bad):
		return ExitRefused
	case errors.Is(err, client.ErrUnreachable):
		return ExitUnreachable
	}
	return ExitUsage // what cobra finds wrong, and a configuration that does not load
}

func (p *Program) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "print the version", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(p.Stdout, "mknetd", p.Version)
			return err
		},
	}
}

func (p *Program) configCommand() *cobra.Command {
	group := &cobra.Command{Use: "config", Short: "look at the configuration", RunE: needCommand}
	var files configFlags
	check := &cobra.Command{
		Use: "check", Short: "check the configuration, and name every fault", Args: cobra.NoArgs,
		Long: "Check reads the configuration as serve would, flags included, and changes nothing.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := files.load(cmd); err != nil {
				return err
			}
			_, err := fmt.Fprintln(p.Stdout, "the configuration is valid")
			return err
		},
	}
	files.register(check, true)
	group.AddCommand(check)
	return group
}

// configFlags are --config and, where every key counts, one flag a key.
type configFlags struct {
	path   string
	values map[string]*string // by flag
}

func (f *configFlags) register(cmd *cobra.Command, everyKey bool) {
	cmd.Flags().StringVar(&f.path, "config", config.DefaultFile, "configuration file; the default one may be missing")
	f.values = map[string]*string{}
	for _, k := range config.Keys() {
		if everyKey || k.Name == "socket" {
			f.values[k.Flag] = cmd.Flags().String(k.Flag, "", k.Doc+" (key "+k.Name+")")
		}
	}
}

// load reads the file and puts the flags that were given over it.
func (f *configFlags) load(cmd *cobra.Command) (config.Config, error) {
	var over []config.Override
	for _, k := range config.Keys() {
		if v, ok := f.values[k.Flag]; ok && cmd.Flags().Changed(k.Flag) {
			over = append(over, config.Override{Key: k.Name, Value: *v})
		}
	}
	return config.Load(f.path, cmd.Flags().Changed("config"), over...)
}

// connect makes a client of the configured daemon.
func (f *configFlags) connect(cmd *cobra.Command) (*client.Client, error) {
	cfg, err := f.load(cmd)
	if err != nil {
		return nil, err
	}
	return client.New("unix://" + cfg.Socket)
}
