// Package agent is what mk-agent does with a confirmed session: it configures
// the device and the resolver, then carries packets. Devices outlive sessions, so
// that a child keeps its address while its shim restarts.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"

	"mknet/mk-agent/internal/link"
	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// primaryLink is the attachment whose resolver configuration the child uses.
const primaryLink = endpoint.ChildLink + "0"

// Agent implements session.Handler. Make it with New and Close it when the
// server has ended.
type Agent struct {
	resolvConf  string // empty: leave it alone
	multikernel bool
	log         *slog.Logger

	mu    sync.Mutex
	links map[string]*attachment
}

// attachment is one device and what it has carried since the agent started.
type attachment struct {
	dev      *link.Device // nil until configured, and after a queue failed
	counters *data.Counters
}

// New returns an Agent. resolvConf is the file to keep, empty for none;
// multikernel says that sessions come by that transport.
func New(resolvConf string, multikernel bool, log *slog.Logger) *Agent {
	return &Agent{resolvConf: resolvConf, multikernel: multikernel, log: log, links: map[string]*attachment{}}
}

// Configure is part of session.Handler.
func (a *Agent) Configure(_ context.Context, cfg pump.LinkConfig) (pump.Ack, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := a.links[cfg.Link]
	if at == nil {
		at = &attachment{counters: new(data.Counters)}
		a.links[cfg.Link] = at
	}
	changes, err := a.configureLocked(at, cfg)
	if err != nil {
		return pump.Ack{}, err
	}
	if a.resolvConf != "" && cfg.Link == primaryLink {
		changed, err := link.EnsureResolvConf(a.resolvConf, cfg.DNS)
		if err != nil {
			return pump.Ack{}, err
		}
		if changed {
			changes = append(changes, "resolver in "+a.resolvConf)
		}
	}
	if len(changes) > 0 {
		a.log.Info("link configured", "link", cfg.Link, "changes", strings.Join(changes, "; "))
	}
	lanes := transport.Lanes(min(cfg.Lanes, at.dev.Lanes), a.multikernel)
	return pump.Ack{VnetHdr: at.dev.VnetHdr, Offloads: at.dev.Offloads, Lanes: lanes, Windows: transport.Windows(lanes, a.multikernel)}, nil
}

// configureLocked opens the device where it is not, and again where somebody
// removed it under us.
func (a *Agent) configureLocked(at *attachment, cfg pump.LinkConfig) ([]string, error) {
	if at.dev != nil {
		changes, err := at.dev.Configure(cfg)
		if err == nil {
			return changes, nil
		}
		a.log.Warn("device opened again", "link", cfg.Link, "err", err)
		a.dropLocked(at)
	}
	dev, err := link.Open(cfg.Link, a.log)
	if err != nil {
		return nil, err
	}
	at.dev = dev
	return dev.Configure(cfg)
}

func (a *Agent) dropLocked(at *attachment) {
	if err := at.dev.Close(); err != nil {
		a.log.Warn("close device", "link", at.dev.Name, "err", err)
	}
	at.dev = nil
}

// Run is part of session.Handler.
func (a *Agent) Run(ctx context.Context, s *session.Session) error {
	a.mu.Lock()
	at := a.links[s.Config.Link]
	queues := at.dev.Queues
	a.mu.Unlock()
	err := s.Carry(ctx, queues, transport.MessageBytes(a.multikernel), at.counters)
	if errors.As(err, new(*data.QueueError)) {
		// Indices of queues move when one is lost: all of them go, and the next
		// session attaches again.
		a.mu.Lock()
		a.dropLocked(at)
		a.mu.Unlock()
	}
	return err
}

// Dump logs the counters of every link.
func (a *Agent) Dump() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for name, at := range a.links {
		a.log.Info("figures", "link", name, "goroutines", runtime.NumGoroutine(), "counters", fmt.Sprintf("%+v", at.counters.Snapshot()))
	}
}

// Close closes the devices' queues; the devices stay.
func (a *Agent) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, at := range a.links {
		if at.dev != nil {
			errs = append(errs, at.dev.Close())
			at.dev = nil
		}
	}
	return errors.Join(errs...)
}
