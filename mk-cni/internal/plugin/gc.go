package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/cache"
	"mknet/mk-cni/internal/config"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var collected = crash.New("cni.collected") // at mknetd, the cache does not say so yet

// gc has mknetd remove every endpoint of this network that is not listed, and
// then forgets the cache entries of endpoints that are gone.
func (c *call) gc() error {
	if err := endpoint.ValidateIdentifier("network", c.att.Network); err != nil {
		c.log.Warn("nothing to collect: no network can have this name", "err", err)
		return nil
	}
	req := api.GCRequest{Network: c.att.Network}
	for _, p := range c.problems {
		// A list that cannot be read must not pass for none.
		if strings.HasPrefix(p.Key, "cni.dev/") {
			return &config.Error{Problems: []config.Problem{p}}
		}
	}
	if c.conf.ValidAttachments != nil {
		list := c.listed(*c.conf.ValidAttachments)
		req.Valid = &list
	}
	ctx, cancel := context.WithTimeout(c.ctx, GCBudget)
	defer cancel()
	reply, err := c.daemon.GC(ctx, req)
	if err != nil {
		return err
	}
	collected.Here()
	c.log.Info("collected", "deleted", len(reply.Deleted), "errors", len(reply.Errors))
	faults := reply.Errors
	if err := c.collectCache(ctx, req, reply); err != nil {
		faults = append(faults, err.Error())
	}
	if err := c.askIPAM("GC"); err != nil {
		faults = append(faults, err.Error())
	}
	c.replay()
	if len(faults) > 0 {
		return types.NewError(CodeIncomplete, fmt.Sprintf("garbage collection of network %s: %d removed, %d could not be; see the details and call GC again",
			c.att.Network, len(reply.Deleted), len(faults)), strings.Join(faults, "; "))
	}
	return nil
}

// listed keeps what can name an endpoint of ours: libcni lists the attachments of
// all networks, lo included.
func (c *call) listed(all []types.GCAttachment) []api.GCAttachment {
	list := []api.GCAttachment{}
	seen := make(map[api.GCAttachment]bool, len(all))
	for _, a := range all {
		att := endpoint.Attachment{Network: c.att.Network, ContainerID: a.ContainerID, IfName: a.IfName}
		item := api.GCAttachment{ContainerID: a.ContainerID, IfName: a.IfName}
		if err := att.Validate(); err != nil {
			c.log.Debug("listed attachment is none of ours", "err", err)
		} else if !seen[item] {
			seen[item] = true
			list = append(list, item)
		}
	}
	return list
}

// maxCacheQuestions bounds how many endpoints one GC asks after.
const maxCacheQuestions = 1024

// collectCache removes entries of this network whose endpoint mknetd deleted or
// does not have, once the IPAM plugin has released the attachment's address: the
// reference ones do nothing when they are called with GC. An entry of a listed
// attachment stays whatever happens.
func (c *call) collectCache(ctx context.Context, req api.GCRequest, reply api.GCReply) error {
	store, err := cache.Open(c.conf.CacheDir, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer store.Close()
	entries, err := store.Entries(c.att.Network)
	if err != nil {
		return err
	}
	ipam, err := c.findIPAM()
	if err != nil {
		return err // an entry is what a later GC finds the address by
	}
	var faults []error
	asked := 0
	for _, e := range entries {
		if req.Valid != nil && slices.Contains(*req.Valid, api.GCAttachment{ContainerID: e.ContainerID, IfName: e.IfName}) {
			continue
		}
		remove := slices.Contains(reply.Deleted, e.Generation)
		switch {
		case remove:
		case e.Generation.IsZero(): // an ADD that never ended: GC by list has deleted what it made
			remove = req.Valid != nil || e.BootID != c.bootID
		case asked < maxCacheQuestions:
			asked++
			_, err := c.daemon.GetEndpoint(ctx, e.Generation)
			remove = errors.Is(err, &api.Error{Code: api.NotFound})
		}
		if !remove {
			continue
		}
		var err error
		if ipam != nil {
			err = c.release(ctx, ipam.Of(e.ContainerID, e.IfName))
		}
		if err == nil {
			err = store.Remove(e.Attachment)
		}
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}
