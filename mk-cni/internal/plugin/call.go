package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/cache"
	"mknet/mk-cni/internal/config"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

// call is one verb with everything it was given.
type call struct {
	ctx           context.Context // ends with the process
	host          Host
	netnsOverride bool
	path          string   // CNI_PATH as the caller gave it
	environ       []string // the caller's environment as it was, for a delegate
	stdin         []byte   // the whole network configuration, for a delegate

	verb      string
	started   time.Time
	att       endpoint.Attachment
	netnsPath string
	conf      config.Config
	problems  []config.Problem // of the configuration
	args      config.Args
	bootID    string
	trace     string

	daemon daemon
	store  *cache.Cache // of ADD
	ipam   delegated    // of ADD
	log    *slog.Logger
	logOut *os.File

	output []byte // the result, of ADD only
	undo   func() // takes the ADD back where its result cannot be delivered
}

func newCall(ctx context.Context, h Host) *call {
	return &call{ctx: ctx, host: h, log: slog.New(slog.DiscardHandler), started: time.Now()}
}

// begin reads the input. Only ADD refuses an input that is not all right, and it
// does so before anything is opened or asked.
func (c *call) begin(verb string, args *skel.CmdArgs) error {
	c.verb, c.started = verb, time.Now()
	conf, problems, err := config.Parse(args.StdinData)
	if err != nil {
		return types.NewError(types.ErrDecodingFailure, err.Error(), "")
	}
	c.conf, c.problems, c.stdin = conf, problems, args.StdinData
	c.att = endpoint.Attachment{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName}
	c.netnsPath = args.Netns
	c.trace = traceParent(os.Getenv("TRACEPARENT"))
	c.openLog()
	var argProblems []config.Problem
	if verb == "ADD" || verb == "CHECK" || verb == "DEL" {
		c.args, argProblems = config.ParseArgs(args.Args)
	}
	if verb == "ADD" {
		problems = append(problems, argProblems...)
		if conf.Mode == endpoint.Multikernel {
			problems = append(problems, c.args.MultikernelProblems()...)
		} else {
			problems = append(problems, c.args.VethProblems(conf.Delegates())...)
		}
		if len(problems) > 0 {
			return &config.Error{Problems: problems}
		}
	}
	c.warnOf(append(problems, argProblems...))
	if c.bootID, err = bootID(); err != nil {
		return types.NewError(types.ErrIOFailure, err.Error(), "")
	}
	if c.daemon, err = c.host.dial(conf.Daemon, c.trace); err != nil {
		return err
	}
	c.log.Debug("begin", "netns", c.netnsPath)
	return nil
}

// maxWarnings bounds what one input can write into the log.
const maxWarnings = 16

func (c *call) warnOf(problems []config.Problem) {
	for i, p := range problems {
		if i == maxWarnings {
			c.log.Warn("more is ignored in the input", "problems", len(problems)-i)
			return
		}
		c.log.Warn("ignored in the input", "problem", p.String())
	}
}

func (c *call) close() {
	if c.daemon != nil {
		c.daemon.Close()
	}
	if c.store != nil {
		c.store.Close()
	}
	if c.logOut != nil {
		_ = c.logOut.Close()
	}
}

// finish logs the outcome.
func (c *call) finish(err *types.Error) {
	took := time.Since(c.started).Round(time.Microsecond)
	if err == nil {
		c.log.Info("done", "took", took)
		return
	}
	c.log.Error("refused", "took", took, "code", err.Code, "err", err.Msg, "details", err.Details)
}

// callerGone takes back what the caller never heard of.
func (c *call) callerGone() {
	c.log.Error("caller went away before it read the result")
	if c.undo != nil {
		c.undo()
	}
}

// cacheEntry reads the attachment's entry without making anything. known is false
// where the generation is not known for certain; the reason is logged.
func (c *call) cacheEntry() (e cache.Entry, known bool) {
	e, err := c.readCache()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		c.log.Debug("no cache entry: delete by attachment")
	case err != nil:
		c.log.Warn("cache entry cannot be used: delete by attachment", "err", err)
	case e.Adding != "":
		c.log.Info("an earlier ADD did not end: delete by attachment too", "generation", e.Generation)
	}
	return e, err == nil && !e.Generation.IsZero()
}

func (c *call) readCache() (cache.Entry, error) {
	store, err := cache.Open(c.conf.CacheDir, false)
	if err != nil {
		return cache.Entry{}, err
	}
	defer store.Close()
	return store.Get(c.att)
}

// forget removes the attachment's cache entry. It is no longer needed, so a
// failure is only logged.
func (c *call) forget() {
	store, err := cache.Open(c.conf.CacheDir, false)
	if err == nil {
		defer store.Close()
		err = store.Remove(c.att)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.log.Warn("cache entry stays", "err", err)
	}
}

// enqueue defers the DEL of one generation, or of the attachment where g is zero.
func (c *call) enqueue(g endpoint.Generation, cookie uint64) error {
	q, err := delqueue.Open(c.host.QueueDir)
	if err != nil {
		return err
	}
	defer func() { _ = q.Close() }()
	return q.Enqueue(delqueue.Entry{
		Attachment: c.att, Generation: g, BootID: c.bootID, Cookie: cookie,
		Daemon: delqueue.Daemon(c.conf.Daemon.String()), QueuedAt: time.Now(), SinceBoot: sinceBoot(),
	})
}

// replayOne does one deferred DEL.
func (c *call) replayOne(ctx context.Context, e delqueue.Entry) error {
	var err error
	switch {
	case e.Obsolete(c.bootID):
	case e.Generation.IsZero():
		_, err = c.daemon.Delete(ctx, e.DeleteRequest(), nil)
	default:
		_, err = c.daemon.DeleteEndpoint(ctx, e.Generation)
	}
	c.log.Info("deferred DEL replayed", "deferred", e.Attachment.String(), "generation", e.Generation, "err", err)
	return err
}

// replay works off a little of the queue. The caller has just had an answer from
// mknetd. What fails stays in the queue and is logged.
func (c *call) replay() {
	q, err := delqueue.OpenExisting(c.host.QueueDir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			c.log.Warn("queue of deferred DELs", "err", err)
		}
		return
	}
	defer func() { _ = q.Close() }()
	ctx, cancel := context.WithTimeout(c.ctx, replayBudget)
	defer cancel()
	ours := func(e delqueue.Entry) bool { return e.MeantFor(c.conf.Daemon.String()) }
	if _, _, err := q.Replay(ctx, replayLimit, ours, c.replayOne); err != nil {
		c.log.Warn("some deferred DELs stay queued", "err", err)
	}
}

// settle does the deferred DELs of this very attachment before it is added again.
func (c *call) settle() error {
	q, err := delqueue.OpenExisting(c.host.QueueDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = q.Close() }()
	ctx, cancel := context.WithTimeout(c.ctx, settleBudget)
	defer cancel()
	for claim, err := range q.ClaimsOf(c.att) {
		if err != nil {
			c.log.Warn("deferred DEL", "err", err)
			continue
		}
		if err := c.replayOne(ctx, claim.Entry); !delqueue.Finished(err) {
			return errors.Join(fmt.Errorf("settle the deferred DEL of %s before it is added again: %w", c.att, err), claim.Release())
		}
		if err := claim.Settle(); err != nil {
			return err
		}
	}
	return nil
}
