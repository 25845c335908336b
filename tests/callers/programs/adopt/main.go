// Command adopt does to the attachments of another caller what a newer runtime
// would do after an upgrade in place: it finds them in libcni's cache and sends
// STATUS, CHECK and a GC that keeps them.
//
//	usage: adopt CONFLIST CACHEDIR...     (CNI_PATH: the plugins)
//
// Callers without these verbs of their own are tried with them this way.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"mknet/tests/callers/programs/step"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: adopt CONFLIST CACHEDIR...")
		os.Exit(2)
	}
	list, err := libcni.NetworkConfFromFile(os.Args[1])
	step.Must("load the list", err)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	adopted := 0
	for _, cache := range os.Args[2:] {
		c := libcni.NewCNIConfigWithCacheDir(filepath.SplitList(os.Getenv("CNI_PATH")), cache, nil)
		all, err := c.GetCachedAttachments("")
		if errors.Is(err, os.ErrNotExist) || err == nil && len(all) == 0 {
			continue
		}
		step.Must("read the cache "+cache, err)
		adopted += adopt(ctx, c, list, all)
	}
	if adopted == 0 {
		step.OK("find attachments", fmt.Errorf("no cache of %v has one of network %s", os.Args[2:], list.Name))
	}
	step.End()
}

// adopt works on the attachments of one cache and returns how many there are.
func adopt(ctx context.Context, c *libcni.CNIConfig, list *libcni.NetworkConfigList, all []*libcni.NetworkAttachment) int {
	var mine []*libcni.RuntimeConf
	keep := &libcni.GCArgs{}
	for _, a := range all {
		if a.Network == list.Name {
			rt := &libcni.RuntimeConf{ContainerID: a.ContainerID, NetNS: a.NetNS, IfName: a.IfName, Args: a.CniArgs, CapabilityArgs: a.CapabilityArgs}
			if rt.NetNS == "" { // an old libcni did not keep it
				rt.NetNS = sandbox(c, list, rt)
			}
			mine = append(mine, rt)
			keep.ValidAttachments = append(keep.ValidAttachments, types.GCAttachment{ContainerID: a.ContainerID, IfName: a.IfName})
		}
	}
	if len(mine) == 0 {
		return 0
	}
	step.OK("STATUS", c.GetStatusNetworkList(ctx, list))
	for _, rt := range mine {
		step.OK("CHECK "+rt.ContainerID, c.CheckNetworkList(ctx, list, rt))
	}
	step.OK("GC that keeps them", c.GCNetworkList(ctx, list, keep))
	for _, rt := range mine {
		step.OK("CHECK after GC "+rt.ContainerID, c.CheckNetworkList(ctx, list, rt))
	}
	return len(mine)
}

// sandbox takes the namespace from the cached result.
func sandbox(c *libcni.CNIConfig, list *libcni.NetworkConfigList, rt *libcni.RuntimeConf) string {
	cached, err := c.GetNetworkListCachedResult(list, rt)
	if err != nil {
		return ""
	}
	res, err := types100.GetResult(cached)
	if err != nil {
		return ""
	}
	for _, i := range res.Interfaces {
		if i.Name == rt.IfName {
			return i.Sandbox
		}
	}
	return ""
}
