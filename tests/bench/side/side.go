// Package side holds the processes that a benchmark starts inside its network
// namespaces: one end of a pump, and sources and sinks of traffic. They are the
// benchmark's own binary, started again with [Command] as first argument, and
// write one line of JSON with what they saw.
//
// The pump is the real one, shim/pump over shim/tun and shim/transport; only the
// handshake of a session is left out.
package side

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// Command is the first argument of a process of this package.
const Command = "side"

// Ports in the far namespace.
const (
	tcpPort = "5555"
	udpPort = "5556"
)

// Patience bounds every wait for the other end.
const Patience = 20 * time.Second

// Main runs the process that args name and returns its exit status.
func Main(args []string) int {
	sides := map[string]func([]string, io.Writer) error{
		"pump": carry, "serve": serve, "once": once, "tcp": tcp, "ask": ask, "receive": receive, "send": send, "flows": flows,
	}
	name := strings.Join(args[:min(1, len(args))], "")
	run, ok := sides[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "side %q: no such process\n", name)
		return 2
	}
	if err := run(args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "side %s: %v\n", name, err)
		return 1
	}
	return 0
}

func say(out io.Writer, what any) error { return json.NewEncoder(out).Encode(what) }
