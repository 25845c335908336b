// Command gocni drives a configuration folder through containerd's go-cni, as
// containerd and nerdctl do: lo and eth0 are added in parallel.
//
//	usage: gocni CONFDIR NETNS [HOOK...]     (CNI_PATH: the plugins)
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	gocni "github.com/containerd/go-cni"

	"mknet/tests/callers/programs/step"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: gocni CONFDIR NETNS [HOOK...]")
		os.Exit(2)
	}
	n := client(2, gocni.WithLoNetwork, gocni.WithDefaultConf)
	step.OK("STATUS", n.Status())
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	opts := []gocni.NamespaceOpts{
		gocni.WithLabels(map[string]string{"K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": "p", "IgnoreUnknown": "1"}),
		gocni.WithCapabilityPortMap([]gocni.PortMapping{{HostPort: 8082, ContainerPort: 80, Protocol: "tcp", HostIP: "0.0.0.0"}}),
		gocni.WithCapabilityDNS(gocni.DNS{Servers: []string{"203.0.113.53"}, Searches: []string{"example.org"}}),
	}
	const id = "gocni-1"
	res, err := n.Setup(ctx, id, os.Args[2], opts...)
	step.Must("ADD", err)
	eth0, ok := res.Interfaces["eth0"]
	step.Equal("the result has eth0", ok, true)
	if ok {
		step.Equal("eth0 has one address", len(eth0.IPConfigs), 1)
		step.Equal("eth0's sandbox", eth0.Sandbox, os.Args[2])
	}
	// go-cni's own loopback network is version 0.3.1, which has no CHECK: it can
	// check only what it loaded without it.
	alone := client(1, gocni.WithDefaultConf)
	step.OK("CHECK", alone.Check(ctx, id, os.Args[2], opts...))
	step.Hook(os.Args[3:])
	step.OK("DEL with an empty CNI_NETNS", n.Remove(ctx, id, "", opts...))
	step.OK("DEL again", n.Remove(ctx, id, os.Args[2], opts...))
	step.End()
}

// client loads the configuration folder.
func client(networks int, load ...gocni.Opt) gocni.CNI {
	n, err := gocni.New(gocni.WithMinNetworkCount(networks), gocni.WithPluginConfDir(os.Args[1]),
		gocni.WithPluginDir(filepath.SplitList(os.Getenv("CNI_PATH"))), gocni.WithInterfacePrefix("eth"))
	step.Must("make a go-cni", err)
	step.Must("load the folder", n.Load(load...))
	return n
}
