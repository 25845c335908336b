package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"mknet/mknetd/internal/api"
	"mknet/mknetd/internal/config"
)

func (p *Program) serveCommand() *cobra.Command {
	var files configFlags
	var takeover bool
	cmd := &cobra.Command{
		Use: "serve", Short: "run the daemon", Args: cobra.NoArgs,
		Long: "Serve brings kernel and records into agreement, then answers on its socket until\nSIGTERM or SIGINT; calls at work are given time to finish, a second signal ends it\nat once. It tells systemd when it is ready (NOTIFY_SOCKET). It needs CAP_NET_ADMIN,\nCAP_SYS_ADMIN and CAP_NET_RAW.\n\nWith --takeover it takes sockets and store from the mknetd that runs, which then ends;\ncallers wait meanwhile, packets do not. Where none runs it just starts.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			context.AfterFunc(ctx, stop) // from then on a signal ends the process
			if err := p.serve(ctx, cfg, newLogger(p.Stderr, cfg.Log), takeover); err != nil {
				return &exitError{status: ExitDiffers, err: err}
			}
			return nil
		},
	}
	files.register(cmd, true)
	cmd.Flags().BoolVar(&takeover, "takeover", false, "take sockets and store from the mknetd that runs")
	return cmd
}

// serve runs the daemon until ctx ends or a newer one has taken over.
func (p *Program) serve(ctx context.Context, cfg config.Config, log *slog.Logger, takeover bool) error {
	gid, err := groupID(cfg.SocketGroup)
	if err != nil {
		return err
	}
	tcp, err := loadTLS(cfg.TCP)
	if err != nil {
		return err
	}
	s := &service{Program: p, cfg: cfg, log: log, api: api.Config{Log: log, Socket: cfg.Socket, SocketGID: gid, TCP: tcp}}
	defer s.dropSockets()
	if takeover {
		if err := s.takeOver(ctx); err != nil {
			return err
		}
	}
	for {
		// A successor that asked for everything and then did not serve has us begin
		// again, on the sockets that it did not get to use.
		again, err := s.run(ctx)
		if !again || ctx.Err() != nil {
			return err
		}
	}
}

func newLogger(w io.Writer, l config.Log) *slog.Logger {
	opts := &slog.HandlerOptions{Level: l.Level}
	if l.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// groupID finds a group by name or number; -1 for none.
func groupID(group string) (int, error) {
	if group == "" {
		return -1, nil
	}
	if n, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(n), nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return -1, fmt.Errorf("socketGroup: %w", err)
	}
	return strconv.Atoi(g.Gid)
}

// loadTLS reads the files of the TCP listener; nil where there is none.
func loadTLS(cfg *config.TCP) (*api.TCP, error) {
	if cfg == nil {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(cfg.Certificate, cfg.Key)
	if err != nil {
		return nil, fmt.Errorf("tcp certificate %s: %w", cfg.Certificate, err)
	}
	pem, err := os.ReadFile(cfg.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("tcp clientCA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("tcp clientCA %s: holds no certificate", cfg.ClientCA)
	}
	return &api.TCP{Address: cfg.Address, TLS: &tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: pool}}, nil
}

func (p *Program) purgeCommand() *cobra.Command {
	var files configFlags
	var yes bool
	cmd := &cobra.Command{
		Use: "purge", Short: "remove everything of mknet from this node", Args: cobra.NoArgs,
		Long: "Purge removes every endpoint, bound or not, every object without a record and the\nshared firewall chains, in both flavours of iptables. No mknetd may run.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !yes {
				return errors.New("purge cuts off every child of this node: say --yes")
			}
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			say := func(what string) { fmt.Fprintln(p.Stdout, "removed", what) }
			if err := p.Purge(cmd.Context(), cfg, newLogger(p.Stderr, cfg.Log), say); err != nil {
				return &exitError{status: ExitDiffers, err: err}
			}
			return nil
		},
	}
	files.register(cmd, true)
	cmd.Flags().BoolVar(&yes, "yes", false, "really do it")
	return cmd
}
