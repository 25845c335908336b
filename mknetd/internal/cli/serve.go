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
	cmd := &cobra.Command{
		Use: "serve", Short: "run the daemon", Args: cobra.NoArgs,
		Long: "Serve brings kernel and records into agreement, then answers on its socket until\nSIGTERM or SIGINT; calls at work are given time to finish, a second signal ends it\nat once. It tells systemd when it is ready (NOTIFY_SOCKET). It needs CAP_NET_ADMIN,\nCAP_SYS_ADMIN and CAP_NET_RAW.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := files.load(cmd)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGTERM, os.Interrupt)
			defer stop()
			context.AfterFunc(ctx, stop) // from then on a signal ends the process
			if err := p.serve(ctx, cfg, newLogger(p.Stderr, cfg.Log)); err != nil {
				return &exitError{status: ExitDiffers, err: err}
			}
			return nil
		},
	}
	files.register(cmd, true)
	return cmd
}

// serve runs the daemon until ctx ends.
func (p *Program) serve(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	gid, err := groupID(cfg.SocketGroup)
	if err != nil {
		return err
	}
	tcp, err := loadTLS(cfg.TCP)
	if err != nil {
		return err
	}
	// First the store and the kernel, then the socket: a daemon that finds another
	// one at work must not have touched its socket.
	daemon, err := p.Start(ctx, cfg, log)
	if err != nil {
		if ctx.Err() != nil {
			return nil // told to end while it started
		}
		return err
	}
	err = p.answer(ctx, api.Config{Engine: daemon, Log: log, Socket: cfg.Socket, SocketGID: gid, TCP: tcp}, log)
	return errors.Join(err, daemon.Close())
}

func (p *Program) answer(ctx context.Context, cfg api.Config, log *slog.Logger) error {
	srv, err := api.New(cfg)
	if err != nil {
		return err
	}
	if err := srv.Listen(ctx); err != nil {
		return err
	}
	log.Info("serving", "socket", cfg.Socket, "version", p.Version)
	// The kernel queues callers from here on, so that whoever is told may call.
	if err := notify("READY=1\nSTATUS=serving on " + cfg.Socket); err != nil {
		log.Warn("tell systemd", "err", err)
	}
	err = srv.Serve(ctx)
	if notifyErr := notify("STOPPING=1"); notifyErr != nil {
		log.Warn("tell systemd", "err", notifyErr)
	}
	log.Info("ended")
	return err
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
		Long: "Purge removes every endpoint, bound or not, every object without a record and the\nshared firewall chains. No mknetd may run.\n" + exitHelp,
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
