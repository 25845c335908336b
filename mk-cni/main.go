// mk-cni is mknet's CNI plugin; installed as "multikernel" it is the same program.
//
// Usage: a container runtime runs it with CNI_COMMAND (ADD, DEL, CHECK, STATUS,
// GC, VERSION) and the other CNI parameters in the environment and the network
// configuration on standard input; see spec/cni.md. Run by hand it says so.
//
// Exit code: 0, or 1 with one CNI error object on standard output.
//
// Files: the generation cache (cacheDir, default /var/lib/cni/multikernel), the
// queue of deferred DELs (/var/lib/mknet/deferred-del), log-file. It speaks to
// mknetd's socket (default /run/mknetd.sock).
//
// Capabilities: none beyond reading CNI_NETNS and writing these files as root. It
// changes no link, route or rule.
package main

import (
	"os"

	"mknet/mk-cni/internal/plugin"
	"mknet/spec/delqueue"
	"mknet/spec/version"
)

func main() {
	// The queue's folder is fixed, so that no configuration hides an entry from mknetd.
	os.Exit(plugin.Main(plugin.Host{Version: version.Version, QueueDir: delqueue.DefaultDir}))
}
