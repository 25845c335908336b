package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"time"

	"mknet/mknetd/internal/cli"
	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/engine"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/store"
	"mknet/mknetd/internal/topo"
	"mknet/spec/endpoint"
	"mknet/spec/version"
)

// daemon is an engine with what it stands on.
type daemon struct {
	*engine.Engine
	host  *topo.Host
	store *store.Store
}

// open opens store, host and firewall and makes an engine that is not started.
// The store comes first: it is what a second instance fails at, before it has
// touched anything.
func open(ctx context.Context, cfg config.Config, log *slog.Logger, storeWait time.Duration) (*daemon, error) {
	st, err := openStore(ctx, cfg, log, storeWait)
	if err != nil {
		return nil, err
	}
	host, err := topo.Open()
	if err != nil {
		return nil, errors.Join(err, st.Close())
	}
	d := &daemon{host: host, store: st}
	flavour := string(cfg.Firewall)
	if cfg.Firewall == config.Auto {
		flavour = ""
	}
	openFirewall := func(ctx context.Context, flavour string) (*ipt.Firewall, error) {
		return ipt.Open(ctx, ipt.Config{
			Flavour: flavour, ChildPool: cfg.Pools.Child, TransitPool: cfg.Pools.Transit,
			Metadata: cfg.Metadata, ConnLimit: cfg.ConnectionLimit,
		})
	}
	firewall, err := openFirewall(ctx, flavour)
	if err == nil {
		d.Engine, err = engine.New(engine.Config{
			Version: version.Version, Pools: cfg.Pools, PodPools: cfg.PodPools, Egress: cfg.Egress, MTUBytes: cfg.MTUBytes,
			Resolver: cfg.Resolver, HostAccess: cfg.HostAccess, PodAccess: cfg.PodAccess,
			Quarantine: cfg.Quarantine, ShimGrace: cfg.ShimGrace, AuditEvery: cfg.AuditInterval,
			Socket: cfg.Socket, StateDir: cfg.StateDir, DeferredDir: cfg.DeferredDelDir, PolicyDir: cfg.PolicyDir,
			OpenFirewall:   openFirewall,
			DatapathPinned: datapath.Pinned(pinDir(cfg.StateDir)), NodeProbes: cfg.NodeProbes == endpoint.Allow,
			OpenDatapath: func() (*datapath.Datapath, error) {
				return datapath.Open(datapath.Config{Dir: pinDir(cfg.StateDir), Log: log})
			},
			PurgeDatapath: func() (bool, error) { return datapath.Purge(datapath.Config{Dir: pinDir(cfg.StateDir)}) },
		}, log, host, firewall, st)
	}
	if err != nil {
		return nil, errors.Join(err, host.Close(), st.Close())
	}
	return d, nil
}

// openStore is store.Open that waits up to wait for another mknetd to end; so long, or
// until ctx ends, it begins again what waits store.DefaultLockTimeout.
func openStore(ctx context.Context, cfg config.Config, log *slog.Logger, wait time.Duration) (*store.Store, error) {
	for first, deadline := true, time.Now().Add(wait); ; first = false {
		st, err := store.Open(store.Options{Dir: cfg.StateDir, Pools: cfg.Pools, Writer: version.Version})
		var locked *store.LockedError
		if !errors.As(err, &locked) || ctx.Err() != nil || !time.Now().Before(deadline) {
			return st, err
		}
		if first {
			log.Info("waiting for another mknetd to end", "wait", wait.String(), "err", err)
		}
	}
}

// pinDir is where the data path is pinned: each daemon of a node has its own.
func pinDir(stateDir string) string {
	if stateDir == config.DefaultStateDir {
		return datapath.DefaultDir
	}
	sum := sha256.Sum256([]byte(stateDir))
	return datapath.DefaultDir + "-" + hex.EncodeToString(sum[:4])
}

// mapDir is where the data path's maps are pinned.
func mapDir(cfg config.Config) string { return datapath.MapDir(pinDir(cfg.StateDir)) }

// Close stops the engine and lets go of host and store; what was built stays.
func (d *daemon) Close() error {
	d.Engine.Close()
	return errors.Join(d.host.Close(), d.store.Close())
}

func startDaemon(ctx context.Context, cfg config.Config, log *slog.Logger, storeWait time.Duration) (cli.Daemon, error) {
	d, err := open(ctx, cfg, log, storeWait)
	if err != nil {
		return nil, err
	}
	if err := d.Start(ctx); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func purge(ctx context.Context, cfg config.Config, log *slog.Logger, say func(string)) error {
	d, err := open(ctx, cfg, log, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Purge(ctx, say), d.Close())
}

func verifierCosts() ([]cli.VerifierCost, error) {
	costs, err := datapath.MeasureVerifier()
	if err != nil {
		return nil, err
	}
	out := make([]cli.VerifierCost, len(costs))
	for i, c := range costs {
		out[i] = cli.VerifierCost{Program: c.Program, Instructions: c.Instructions, Limit: datapath.VerifierLimit, Percent: c.Percent()}
	}
	return out, nil
}
