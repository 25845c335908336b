package plugin

import (
	"context"
	"errors"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/api"
	"mknet/spec/endpoint"
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
	text := strings.Join(causes, "; ")
	switch {
	case c.conf.Mode == endpoint.Veth && !c.conf.Delegates() && podsBlocked(health) != "":
		return types.NewError(types.ErrPluginNotAvailable, "mknetd gives no address to ordinary pods now: "+podsBlocked(health), text)
	case health.Ready:
		c.log.Debug("mknetd is ready", "causes", text, "freeSlots", health.FreeSlots)
		return nil
	case health.LimitsExisting:
		return types.NewError(types.ErrLimitedConnectivity, "mknetd accepts no ADD now, and existing endpoints may have limited connectivity", text)
	}
	return types.NewError(types.ErrPluginNotAvailable, "mknetd accepts no ADD now", text)
}

// podsBlocked is why no ordinary pod would get an address; empty where one would.
func podsBlocked(h api.Health) string {
	for _, cause := range h.Causes {
		if cause.Code == api.CausePodPools {
			return cause.Message
		}
	}
	return ""
}
