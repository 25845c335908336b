// Command libcni drives a network list through libcni itself: every verb, in the
// orders that runtimes use and get wrong.
//
//	usage: libcni CONFLIST CACHEDIR NETNS1 NETNS2     (CNI_PATH: the plugins)
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

	"mknet/tests/callers/programs/step"
)

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: libcni CONFLIST CACHEDIR NETNS1 NETNS2")
		os.Exit(2)
	}
	cache := os.Args[2]
	c := libcni.NewCNIConfigWithCacheDir(filepath.SplitList(os.Getenv("CNI_PATH")), cache, nil)
	list, err := libcni.NetworkConfFromFile(os.Args[1])
	step.Must("load the list", err)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()

	_, err = c.ValidateNetworkList(ctx, list)
	step.OK("VERSION of every plugin, capabilities", err)
	a, b := attachment("libcni-a", os.Args[3]), attachment("libcni-b", os.Args[4])
	b.CapabilityArgs = nil

	step.OK("STATUS", c.GetStatusNetworkList(ctx, list))
	_, err = c.AddNetworkList(ctx, list, a)
	step.Must("ADD a", err)
	_, err = c.AddNetworkList(ctx, list, b)
	step.Must("ADD b", err)
	cached, err := c.GetNetworkListCachedResult(list, a)
	step.OK("cached result of a", err)
	if err == nil {
		_, err = cached.GetAsVersion("0.3.1")
		step.OK("the result in version 0.3.1", err)
	}
	step.OK("CHECK a", c.CheckNetworkList(ctx, list, a))
	_, err = c.AddNetworkList(ctx, list, a)
	step.Refused("ADD a again is refused", err)
	step.OK("CHECK a after the refusal", c.CheckNetworkList(ctx, list, a))

	step.OK("GC that keeps a and b", c.GCNetworkList(ctx, list, valid(a, b)))
	step.OK("CHECK a after GC", c.CheckNetworkList(ctx, list, a))
	step.OK("CHECK b after GC", c.CheckNetworkList(ctx, list, b))
	step.OK("GC that keeps a", c.GCNetworkList(ctx, list, valid(a)))
	step.OK("CHECK a after the second GC", c.CheckNetworkList(ctx, list, a))
	step.Refused("CHECK b after the second GC fails", c.CheckNetworkList(ctx, list, b))

	noNetns := attachment("libcni-a", "")
	step.OK("DEL a with an empty CNI_NETNS", c.DelNetworkList(ctx, list, noNetns))
	step.OK("DEL a again", c.DelNetworkList(ctx, list, a))
	step.OK("DEL of what never was", c.DelNetworkList(ctx, list, attachment("ghost", "/run/netns/no-such")))

	_, err = c.AddNetworkList(ctx, list, b)
	step.OK("ADD b after GC took it", err)
	step.OK("libcni's cache is spoilt", spoil(cache))
	step.OK("DEL b with a spoilt cache", c.DelNetworkList(ctx, list, b))
	_, err = c.AddNetworkList(ctx, list, a)
	step.OK("ADD a after DEL", err)
	step.OK("DEL a", c.DelNetworkList(ctx, list, a))
	step.OK("GC with an empty list", c.GCNetworkList(ctx, list, &libcni.GCArgs{}))
	step.OK("GC with no list", c.GCNetworkList(ctx, list, nil))
	step.End()
}

// attachment is what containerd would hand over, K8S args and ports included.
func attachment(id, netns string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: netns, IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", id}, {"K8S_POD_NAMESPACE", "default"}},
		CapabilityArgs: map[string]any{
			"portMappings": []map[string]any{{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}},
			"undeclared":   1, // libcni must not pass it on
		},
	}
}

func valid(all ...*libcni.RuntimeConf) *libcni.GCArgs {
	args := &libcni.GCArgs{}
	for _, a := range all {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return args
}

// spoil writes garbage over libcni's cached results.
func spoil(cache string) error {
	files, err := filepath.Glob(filepath.Join(cache, "results", "*"))
	if err == nil && len(files) == 0 {
		err = errors.New("there is no cached result")
	}
	for _, f := range files {
		err = errors.Join(err, os.WriteFile(f, []byte("{garbage"), 0o600))
	}
	return err
}
