package plugin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"mknet/mk-cni/internal/cache"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	deletionAnswered = crash.New("cni.del-answered") // by mknetd, the cache does not say so yet
	deletionQueued   = crash.New("cni.del-queued")   // the cache does not say so yet
)

// del deletes the attachment's endpoint and then has the IPAM plugin release its
// address. It succeeds when there is nothing to delete, and when mknetd does not
// answer and the DEL is on disk in the queue: until that is done mknetd refuses the
// address to anybody else.
func (c *call) del() error {
	if err := c.att.Validate(); err != nil {
		// ADD refuses such a name, so nothing of it exists; an error would only keep
		// the runtime from removing its sandbox.
		c.log.Warn("nothing to delete: no endpoint can have this identity", "err", err)
		return nil
	}
	// A namespace that is gone, a plain file or our own does not matter here.
	ns, err := openNetns(c.netnsPath, c.netnsOverride)
	if err != nil && c.netnsPath != "" {
		c.log.Info("delete without the namespace", "netns", c.netnsPath, "err", err)
	}
	defer ns.close()
	entry, known := c.cacheEntry()
	err = c.deleteNow(entry, known, ns)
	switch {
	case err == nil:
		deletionAnswered.Here()
		defer c.replay()
	case !unreachable(err):
		return err
	default:
		if err := c.deferDelete(entry, known, err); err != nil {
			return err
		}
		deletionQueued.Here()
	}
	// The entry stays where the release fails: GC finds the attachment by it.
	p, err := c.findIPAM()
	if err == nil {
		err = c.release(c.ctx, p)
	}
	if err == nil {
		c.forget()
	}
	return err
}

// deleteNow asks mknetd: by generation where it is known, by attachment where it
// is not or where an ADD began that did not end.
func (c *call) deleteNow(entry cache.Entry, known bool, ns *netns) error {
	notAfter, boot := time.Now(), c.moment()
	ctx, cancel := context.WithTimeout(c.ctx, delCallBudget)
	defer cancel()
	if known {
		reply, err := c.daemon.DeleteEndpoint(ctx, entry.Generation)
		if err := c.gone(err); err != nil {
			return err
		}
		c.log.Info("deleted by generation", "generation", entry.Generation, "deleted", reply.Deleted)
		if entry.Adding == "" {
			return nil
		}
	}
	req := api.DeleteRequest{
		Selector: api.Selector{Attachment: c.att, NetnsPath: netnsPathOf(ns)},
		NotAfter: &notAfter, NotAfterBoot: &boot,
	}
	reply, err := c.daemon.Delete(ctx, req, c.passed(ns))
	if err := c.gone(err); err != nil {
		return err
	}
	c.log.Info("deleted by attachment", "deleted", reply.Deleted)
	return nil
}

func netnsPathOf(ns *netns) string {
	if ns == nil {
		return ""
	}
	return ns.file.Name()
}

// gone turns "what you mean is not there any more" into success: a DEL that comes
// late or again has nothing to do, and must not touch what came after.
func (c *call) gone(err error) error {
	var refused *api.Error
	if errors.As(err, &refused) {
		switch refused.Code {
		case api.NotFound, api.StaleGeneration, api.StaleIdentity:
			c.log.Info("nothing to delete", "err", err)
			return nil
		}
	}
	return err
}

// deferDelete queues what deleteNow could not say to mknetd. A DEL by attachment goes
// without a namespace: the cookie of the cache is that of an older endpoint, and what
// an unfinished ADD has made may be in another namespace. It spares what is younger by
// the time at which it was queued.
func (c *call) deferDelete(entry cache.Entry, known bool, cause error) error {
	var err error
	if known {
		err = c.enqueue(entry.Generation, entry.Cookie)
	}
	if err == nil && (!known || entry.Adding != "") {
		err = c.enqueue(endpoint.Generation{}, 0)
	}
	if err != nil {
		//nolint:errorlint // the queue's error decides the code, not the cause
		return fmt.Errorf("mknetd at %s does not answer (%v) and the DEL of %s cannot be queued: %w", c.conf.Daemon, cause, c.att, err)
	}
	c.log.Warn("mknetd does not answer: the DEL is queued", "generation", entry.Generation, "err", cause)
	return nil
}
