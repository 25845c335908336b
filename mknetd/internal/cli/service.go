package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"mknet/mknetd/internal/api"
	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/handover"
	"mknet/mknetd/internal/metrics"
)

const (
	// releaseWait is how long a successor waits for the store: the other side's
	// calls at work, their undo, and the end of its engine.
	releaseWait = 60 * time.Second
	// storeWait is how long the store of an ending mknetd is waited for: it may have been
	// told to end before it was asked for anything, and has what systemd gives it
	// (DefaultTimeoutStopSec) before it is killed.
	storeWait = 90 * time.Second
	// successorWait is how long the other side waits for its successor to serve: as
	// long as it takes to bring kernel and records of a full node into agreement.
	successorWait = 2 * time.Minute
	// Between callers that could not be accepted: without a descriptor to spare the
	// same one fails again at once.
	firstAcceptWait = 100 * time.Millisecond
	maxAcceptWait   = time.Second
)

// The names of the sockets in a takeover.
const (
	socketAPI     = "api"
	socketTCP     = "tcp"
	socketControl = "control"
	socketMetrics = "metrics"
)

// service is one serve command: a daemon, its sockets, and those who take over.
type service struct {
	*Program
	cfg config.Config
	log *slog.Logger
	api api.Config

	// grant is the daemon that is taken over from, until we serve.
	grant *handover.Grant
	// storeWait is Start's: 0 until there was a takeover, of either side.
	storeWait time.Duration
	// sockets are those to go on with, by name: taken over, or kept for the case
	// that a successor fails. Empty: new ones are made.
	sockets map[string]*os.File
	// listener serves metrics; nil: none does.
	listener *metrics.Listener
}

func (s *service) dropSockets() {
	for _, f := range s.sockets {
		_ = f.Close()
	}
	s.sockets = nil
}

func (s *service) hello() handover.Hello {
	h := handover.Hello{Program: s.Version, PID: os.Getpid(), Socket: s.cfg.Socket, Metrics: s.cfg.MetricsAddress}
	if s.cfg.TCP != nil {
		h.TCP = s.cfg.TCP.Address
	}
	return h
}

// takeOver gets the sockets of the daemon that runs, and then the store's lock.
func (s *service) takeOver(ctx context.Context) error {
	s.storeWait = storeWait
	grant, err := handover.Ask(ctx, s.cfg.StateDir, s.hello())
	if errors.Is(err, handover.ErrNobody) {
		s.log.Info("nobody to take over from, starting")
		return nil
	}
	if err != nil {
		return err
	}
	if err := grant.AwaitRelease(ctx, releaseWait); err != nil {
		return errors.Join(err, grant.Close())
	}
	s.log.Info("taking over")
	s.grant, s.sockets = grant, grant.Files
	return nil
}

// giveBack has the daemon before serve on.
func (s *service) giveBack(why error) {
	if s.grant == nil {
		return
	}
	if err := errors.Join(s.grant.Failed(why), s.grant.Close()); err != nil {
		s.log.Warn("give back what was taken over", "err", err)
	}
	s.grant, s.sockets = nil, nil
}

// run is one life of the engine. again says that a successor has failed and the
// sockets are there to go on with.
func (s *service) run(ctx context.Context) (again bool, err error) {
	// First the store and the kernel, then the socket: a daemon that finds another
	// one at work must not have touched its socket.
	daemon, err := s.Start(ctx, s.cfg, s.log, s.storeWait)
	if err != nil {
		s.giveBack(err)
		if ctx.Err() != nil {
			return false, nil // told to end while it started
		}
		return false, err
	}
	set := metrics.New(daemon)
	srv, control, err := s.listen(ctx, daemon, set)
	if err != nil {
		err = errors.Join(err, daemon.Close())
		s.giveBack(err)
		return false, err
	}
	s.listener = s.listenMetrics(ctx, set)
	if s.grant == nil {
		s.dropSockets()
	}
	s.announce()
	request, err := s.answer(ctx, srv, control)
	if request == nil {
		err = errors.Join(err, s.endMetrics(), control.close(true))
		return false, errors.Join(err, daemon.Close())
	}
	s.log.Info("handing over", "peerPid", request.PID, "version", request.Program)
	if s.sockets[socketMetrics] == nil {
		err = errors.Join(err, s.endMetrics()) // the successor may want the port
	} else {
		// Its successor answers from the same socket once it serves. Until then the last
		// figures are better than none, and this daemon is as ready as it was: calls wait.
		set.Freeze(ctx)
	}
	if err := errors.Join(err, control.close(false), daemon.Close()); err != nil {
		s.log.Warn("end of the engine", "err", err)
	}
	err = request.Released(successorWait)
	if endErr := s.endMetrics(); endErr != nil {
		s.log.Warn("end of the metrics listener", "err", endErr)
	}
	if closeErr := request.Close(); err == nil {
		s.log.Info("handed over", "peerPid", request.PID, "version", request.Program)
		return false, closeErr
	}
	s.log.Error("serving on, the successor does not", "err", err)
	s.storeWait = storeWait
	return true, nil
}

// listen makes the server and the socket for takeovers, on the sockets that are
// there to go on with.
func (s *service) listen(ctx context.Context, daemon Daemon, set *metrics.Set) (*api.Server, *control, error) {
	cfg := s.api
	cfg.Engine = daemon
	cfg.Observe, cfg.Metrics = set.Call, set.Handler()
	// The store is ours, so whoever had it before has removed what it removes. One that
	// was told to end after it had passed the sockets took their files with it.
	if _, err := os.Lstat(s.cfg.Socket); errors.Is(err, os.ErrNotExist) {
		for _, name := range []string{socketAPI, socketTCP, socketControl} {
			if f := s.sockets[name]; f != nil {
				_ = f.Close()
				delete(s.sockets, name)
			}
		}
	}
	if f := s.sockets[socketAPI]; f != nil {
		cfg.Inherited = &api.Sockets{Unix: f, TCP: s.sockets[socketTCP]}
	}
	srv, err := api.New(cfg)
	if err != nil {
		return nil, nil, err
	}
	if err := srv.Listen(ctx); err != nil {
		return nil, nil, err
	}
	c := &control{}
	if f := s.sockets[socketControl]; f != nil {
		c.Listener, err = handover.Inherit(s.cfg.StateDir, f)
	} else {
		c.Listener, err = handover.Listen(s.cfg.StateDir)
	}
	if err != nil {
		// Only a takeover needs it.
		s.log.Warn("this mknetd cannot be taken over from", "err", err)
	}
	return srv, c, nil
}

// listenMetrics opens the loopback listener where one is configured, on the socket of
// the daemon before where that has passed it. The network of a node does not depend
// on it: without its port the daemon goes on.
func (s *service) listenMetrics(ctx context.Context, set *metrics.Set) *metrics.Listener {
	if s.cfg.MetricsAddress == "" {
		return nil
	}
	var l *metrics.Listener
	var err error
	if f := s.sockets[socketMetrics]; f != nil {
		l, err = set.Inherit(f, s.log)
	} else {
		l, err = set.Listen(ctx, s.cfg.MetricsAddress, s.log)
	}
	if err != nil {
		s.log.Error("metrics are not served", "err", err)
		return nil
	}
	s.log.Info("serving metrics", "address", l.Addr().String())
	return l
}

func (s *service) endMetrics() error {
	if s.listener == nil {
		return nil
	}
	l := s.listener
	s.listener = nil
	return l.Close()
}

// announce tells whoever waits that calls are answered: the kernel queues callers
// from here on.
func (s *service) announce() {
	state := "READY=1\nSTATUS=serving on " + s.cfg.Socket
	if s.grant != nil {
		// systemd must know before the process that it knows is gone.
		state = fmt.Sprintf("MAINPID=%d\n%s", os.Getpid(), state)
	}
	s.log.Info("serving", "socket", s.cfg.Socket, "version", s.Version)
	if err := notify(state); err != nil {
		s.log.Warn("tell systemd", "err", err)
	}
	if s.grant == nil {
		return
	}
	// The other side may be dead: then nobody is left to be told.
	if err := errors.Join(s.grant.Serving(), s.grant.Close()); err != nil {
		s.log.Warn("tell the mknetd before", "err", err)
	}
	s.grant, s.sockets = nil, nil
}

// answer serves until ctx ends, or until a successor has the sockets: then it is
// returned, and waits for the store.
func (s *service) answer(ctx context.Context, srv *api.Server, control *control) (*handover.Request, error) {
	defer context.AfterFunc(ctx, func() {
		s.log.Info("told to end")
		_ = control.stop() // at once, so that a successor that comes now is not let in
	})()
	ctx, end := context.WithCancel(ctx)
	defer end()
	// It is the conversation that ends Serve, not ctx: a successor that has been given the
	// sockets counts on their files, which Serve removes unless it was told before.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var request *handover.Request
	var waiting sync.WaitGroup
	waiting.Go(func() {
		defer stop()
		if request = s.successor(ctx, srv, control); request != nil {
			srv.HandOver()
		}
	})
	err := srv.Serve(serving)
	end()
	err = errors.Join(err, control.stop())
	waiting.Wait()
	if request == nil {
		if notifyErr := notify("STOPPING=1"); notifyErr != nil {
			s.log.Warn("tell systemd", "err", notifyErr)
		}
		s.log.Info("ended")
	}
	return request, err
}

// successor waits for one that has taken the sockets and is ready for the store;
// nil once ctx has ended.
func (s *service) successor(ctx context.Context, srv *api.Server, control *control) *handover.Request {
	if control.Listener == nil {
		<-ctx.Done()
		return nil
	}
	for wait := firstAcceptWait; ctx.Err() == nil; {
		r, err := control.Accept(ctx)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			s.log.Warn("no takeover could be begun", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(wait):
			}
			wait = min(2*wait, maxAcceptWait)
			continue
		}
		if err = s.give(r, srv, control); err == nil {
			return r
		}
		if ctx.Err() != nil {
			return nil
		}
		s.log.Warn("a takeover was begun and not gone on with", "err", err)
		wait = firstAcceptWait
	}
	return nil
}

// give passes the sockets, and keeps descriptors of them. On error the
// conversation is over.
func (s *service) give(r *handover.Request, srv *api.Server, control *control) error {
	if want, got := s.hello(), r.Hello; got.Socket != want.Socket || got.TCP != want.TCP {
		why := fmt.Sprintf("it listens on %s %s, the new one would on %s %s: restart it instead", want.Socket, want.TCP, got.Socket, got.TCP)
		return errors.Join(errors.New(why), r.Refuse(why))
	}
	sockets, err := srv.Sockets()
	if err != nil {
		return errors.Join(err, r.Refuse(err.Error()))
	}
	s.sockets = map[string]*os.File{socketAPI: sockets.Unix}
	names, files := []string{socketAPI}, []*os.File{sockets.Unix}
	if sockets.TCP != nil {
		s.sockets[socketTCP] = sockets.TCP
		names, files = append(names, socketTCP), append(files, sockets.TCP)
	}
	if s.listener != nil && r.Metrics == s.cfg.MetricsAddress {
		f, err := s.listener.File()
		if err != nil {
			s.log.Warn("pass the metrics listener", "err", err) // the successor makes its own
		} else {
			s.sockets[socketMetrics] = f
			names, files = append(names, socketMetrics), append(files, f)
		}
	}
	f, err := control.File()
	if err == nil {
		s.sockets[socketControl] = f
		err = r.Grant(append(names, socketControl), append(files, f))
	}
	if err != nil {
		s.dropSockets()
		return errors.Join(err, r.Close())
	}
	return nil
}

// control is the socket for takeovers; without a listener there is none.
type control struct {
	*handover.Listener
	once sync.Once
}

// stop ends Accept. It may be called at any time, and again.
func (c *control) stop() (err error) {
	if c.Listener != nil {
		c.once.Do(func() { err = c.Listener.Close() })
	}
	return err
}

// close also removes the socket's file where nobody goes on with it. The store is
// still ours then, so the file is nobody else's.
func (c *control) close(remove bool) error {
	if c.Listener == nil {
		return nil
	}
	if err := c.stop(); err != nil || !remove {
		return err
	}
	return c.Listener.Remove()
}
