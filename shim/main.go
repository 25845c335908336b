// Command mk-shim is mknet's carrier in the primary: one for each sandbox. It
// takes the TUN of an endpoint from mknetd, reaches the child's mk-agent, makes
// sure of who that is, and carries packets between the two for as long as the
// binding stands.
//
// Usage:
//
//	mk-shim run --endpoint GENERATION --sandbox-id ID --sandbox-generation GEN --agent URL --token FILE [flags]
//	mk-shim run --network NAME --container-id ID --ifname NAME ...
//	mk-shim run --netns PATH ...
//	mk-shim stats [--endpoint GENERATION]
//	mk-shim token FILE
//	mk-shim version
//
// Signals: SIGTERM and SIGINT end run in order, with UNBIND; SIGUSR1 logs its
// figures.
//
// Exit codes of run; a runtime may act on them:
//
//	0   ended in order, or with its runtime
//	1   failed otherwise
//	2   wrong usage
//	3   mknetd refused, or cannot be reached
//	4   mknetd refused: the endpoint or sandbox generation is stale
//	5   no device: no vsock in this kernel, no child with that CID, no VMM
//	6   refused: the child runs, but nobody listens on the port
//	7   timed out: no answer from the child
//	8   authentication failed: the two ends hold different tokens
//	9   protocol version mismatch
//	10  sandbox mismatch
//	11  sandbox generation mismatch
//	12  endpoint generation mismatch
//	13  the binding is gone: endpoint deleted, bound to another sandbox, or taken over by another shim
//	14  this kernel lacks what the address asks for (transport=multikernel)
//	15  token file not usable
//	16  the agent could not configure its link
//
// 5, 6 and 7 are tried again for as long as --connect-timeout and
// --reconnect-timeout allow; all others end mk-shim at once.
//
// Files: mknetd's socket, the token file (and FILE.next while a token is being
// replaced), /run/mk-shim/GENERATION.sock (0600) for stats.
//
// It runs as root, in the primary's root namespace: CAP_NET_ADMIN for large
// socket buffers, CAP_BPF for the latency lane; it does without either.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"mknet/shim/internal/binding"
	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/pump"
	"mknet/spec/version"
)

// Exit codes, as the package comment has them.
const (
	exitFailed             = 1
	exitUsage              = 2
	exitDaemon             = 3
	exitStale              = 4
	exitNoDevice           = 5
	exitRefused            = 6
	exitTimedOut           = 7
	exitAuthentication     = 8
	exitVersion            = 9
	exitSandbox            = 10
	exitSandboxGeneration  = 11
	exitEndpointGeneration = 12
	exitGone               = 13
	exitUnsupported        = 14
	exitToken              = 15
	exitAgentRefused       = 16
)

const exitHelp = `Exit codes of run:
  0 ended in order            9 version mismatch
  1 failed otherwise         10 sandbox mismatch
  2 wrong usage              11 sandbox generation mismatch
  3 mknetd refused           12 endpoint generation mismatch
  4 stale generation         13 binding gone
  5 no vsock device, child   14 transport not in this kernel
  6 agent does not listen    15 token file not usable
  7 timed out                16 agent could not configure its link
  8 authentication failed`

// usageError marks what is wrong with the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func main() {
	root := &cobra.Command{
		Use: "mk-shim", Short: "carry packets between an endpoint and its child kernel", Long: "mk-shim carries packets between an endpoint and its child kernel.\n\n" + exitHelp,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.SetOut(os.Stdout)
	root.AddCommand(runCommand(), statsCommand(), tokenCommand(), &cobra.Command{
		Use: "version", Short: "print the version", Args: cobra.NoArgs,
		Run: func(c *cobra.Command, _ []string) { c.Println(version.Version) },
	})
	root.CompletionOptions.DisableDefaultCmd = true
	err := root.Execute()
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "mk-shim:", err)
	if !errors.As(err, new(*failure)) {
		os.Exit(exitUsage) // cobra's own errors are about the command line
	}
	os.Exit(exitCode(err))
}

// failure marks an error of a command that began: all others are cobra's.
type failure struct{ err error }

func (e *failure) Error() string { return e.err.Error() }
func (e *failure) Unwrap() error { return e.err }

// action is a cobra RunE whose error is a *failure.
func action(f func(c *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		if err := f(c, args); err != nil {
			return &failure{err}
		}
		return nil
	}
}

// exitCode maps an error to the code that a runtime acts on.
func exitCode(err error) int {
	var (
		mismatch *pump.MismatchError
		refusal  *api.Error
		dial     *transport.DialError
		closed   *data.PeerClosedError
	)
	switch {
	case errors.As(err, new(*usageError)), errors.As(err, new(*transport.AddressError)):
		return exitUsage
	case errors.As(err, new(*session.TokenFileError)), errors.Is(err, errTokenFile), errors.Is(err, session.ErrNextToken):
		return exitToken
	case errors.As(err, &mismatch):
		switch mismatch.Field {
		case pump.Version:
			return exitVersion
		case pump.Sandbox:
			return exitSandbox
		case pump.SandboxGeneration:
			return exitSandboxGeneration
		case pump.EndpointGeneration:
			return exitEndpointGeneration
		}
		return exitFailed
	case errors.Is(err, session.ErrAuthentication):
		return exitAuthentication
	case errors.Is(err, binding.ErrGone), errors.As(err, &closed) && (closed.Reason == pump.Displaced || closed.Reason == pump.Unbound):
		return exitGone
	case errors.As(err, &refusal):
		if refusal.Code == api.StaleGeneration || refusal.Code == api.StaleIdentity {
			return exitStale
		}
		return exitDaemon
	case errors.Is(err, client.ErrUnreachable), errors.As(err, new(*client.ReplyError)), errors.As(err, new(*binding.MismatchError)), errors.Is(err, errDaemon):
		return exitDaemon
	case errors.As(err, new(*session.RefusedError)):
		return exitAgentRefused
	case errors.Is(err, session.ErrTimeout), errors.As(err, new(*data.DeadPeerError)):
		return exitTimedOut
	case errors.Is(err, session.ErrClosed):
		return exitRefused // some VMMs accept before they ask their guest
	case errors.As(err, &dial):
		switch dial.Kind {
		case transport.NoDevice:
			return exitNoDevice
		case transport.Refused:
			return exitRefused
		case transport.TimedOut:
			return exitTimedOut
		case transport.Unsupported:
			return exitUnsupported
		}
	}
	return exitFailed
}
