package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/privdir"
)

// status says whether an ADD would be accepted now: 50 where not, 51 where
// existing endpoints may be limited too, with every cause in the details.
func (c *call) status() error {
	ctx, cancel := context.WithTimeout(c.ctx, StatusBudget)
	defer cancel()
	health, err := c.daemon.Health(ctx)
	if err != nil {
		// The data path is the kernel's and the shims': without mknetd what exists
		// goes on as it was.
		var refused *api.Error
		if errors.As(err, &refused) {
			return types.NewError(types.ErrPluginNotAvailable, "mknetd cannot tell its health: "+refused.Message, string(refused.Code))
		}
		return types.NewError(types.ErrPluginNotAvailable, "mknetd at "+c.conf.Daemon.String()+" does not answer; start it: systemctl start mknetd", err.Error())
	}
	causes := make([]string, 0, len(health.Causes))
	for _, cause := range health.Causes {
		causes = append(causes, cause.Code+": "+cause.Message)
	}
	own := c.ownCauses()
	text := strings.Join(append(causes, own...), "; ")
	var blocked string
	if c.conf.Mode == endpoint.Veth && !c.conf.Delegates() {
		if blocked, err = c.podsBlocked(ctx, health); err != nil {
			return err
		}
	}
	ready := health.Ready || c.othersAlone(health)
	switch {
	case !ready && health.LimitsExisting:
		return types.NewError(types.ErrLimitedConnectivity, "mknetd accepts no ADD now, and existing endpoints may have limited connectivity", text)
	case blocked != "":
		return types.NewError(types.ErrPluginNotAvailable, "mknetd gives no address to ordinary pods now: "+blocked, text)
	case ready && len(own) > 0:
		return types.NewError(types.ErrPluginNotAvailable, "mknetd is ready, but mk-cni would refuse an ADD: "+own[0], text)
	case ready:
		c.log.Debug("mknetd is ready", "causes", text, "freeSlots", health.FreeSlots)
		return c.ipamStatus()
	}
	return types.NewError(types.ErrPluginNotAvailable, "mknetd accepts no ADD now", text)
}

// othersAlone reports whether all that keeps mknetd from being ready concerns
// endpoints of the other mode.
func (c *call) othersAlone(h api.Health) bool {
	others := false
	for _, cause := range h.Causes {
		switch {
		case !cause.Blocks:
		case cause.Mode == "" || cause.Mode == c.conf.Mode:
			return false
		default:
			others = true
		}
	}
	return others
}

// podsBlocked is why no ordinary pod would get an address of mknetd's pools; empty
// where one would. Having no pool is no fault of a node that serves children only,
// so that mknetd's health does not tell.
func (c *call) podsBlocked(ctx context.Context, h api.Health) (string, error) {
	for _, cause := range h.Causes {
		if cause.Code == api.CausePodPools {
			return cause.Message, nil
		}
	}
	conf, err := c.daemon.Config(ctx)
	if err != nil {
		return "", fmt.Errorf("ask mknetd for its pools: %w", err)
	}
	if len(conf.Pools) == 0 {
		return "it has no pool for them; add one under `pools` in its configuration and restart it, or configure \"ipam\"", nil
	}
	return "", nil
}

// ownCauses are the reasons why an ADD would fail before mknetd is asked: a folder
// of ours that cannot be used. A folder that is missing is made by the ADD.
func (c *call) ownCauses() []string {
	var causes []string
	for _, folder := range []struct{ code, path string }{{"cache-unusable", c.conf.CacheDir}, {"queue-unusable", c.host.QueueDir}} {
		dir, err := privdir.Open(folder.path, false)
		if err == nil {
			err = dir.CheckWritable()
			_ = dir.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			causes = append(causes, folder.code+": "+err.Error())
		}
	}
	return causes
}
