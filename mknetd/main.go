// Command mknetd owns the network of a multikernel host: every link, route and
// rule in the primary kernel, the addresses, and the durable record of each.
//
// usage: mknetd serve | endpoints | inventory | events | doctor | explain | trace | top | bind | policy | bpf | config | purge | state | verifier-check | version
//
// exit:  0 success; 1 the inventory found a difference, a packet would not pass, state
// a damage, verifier-check a program that costs too much, or the daemon failed; 2
// wrong arguments or configuration; 3 no mknetd answers; 4 mknetd
// refused; 5 the doctor has warnings, 6 errors.
//
// files: /etc/mknetd/config.yaml (read), /var/lib/mknet (state, deferred DELs),
// /run/mknetd.sock, /run/netns/mk-*, /sys/fs/bpf/mknet (programs and maps of
// ordinary pods); the socket for takeovers is in the state folder.
//
// capabilities: CAP_NET_ADMIN (links, routes, rules, TUN), CAP_SYS_ADMIN (enter
// namespaces), CAP_NET_RAW (iptables), CAP_KILL (fence a shim), CAP_SYS_PTRACE
// (open /proc/PID/ns/net of a runtime's processes).
package main

import (
	"context"
	"os"
	"runtime"

	"mknet/mknetd/internal/cli"
	"mknet/spec/version"
)

// The main thread never ends, so nothing may leave it in another namespace: a
// goroutine that enters one must get a thread that can be thrown away.
func init() { runtime.LockOSThread() }

func main() {
	p := &cli.Program{Version: version.Version, Start: startDaemon, Purge: purge, State: stateTools{}, Verifier: verifierCosts, MapDir: mapDir, Stdout: os.Stdout, Stderr: os.Stderr}
	os.Exit(p.Run(context.Background(), os.Args[1:]))
}
