package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"mknet/mk-cni/internal/config"
	"mknet/mk-cni/internal/input"
	"mknet/mk-cni/internal/version"
	"mknet/spec/crash"
)

var resultPrinted = crash.New("cni.result-printed")

// Host is what is fixed when the program is built.
type Host struct {
	Version  string
	QueueDir string // see delqueue.DefaultDir

	dial func(config.Daemon, string) (daemon, error) // nil: dial; tests of defects set it
}

// usage is shown where no runtime calls us.
const usage = `CNI plugin mk-cni %s
mk-cni is called by a container runtime, with CNI_COMMAND and its other
parameters in the environment and the network configuration on standard input.
To call it by hand use cnitool, or: CNI_COMMAND=VERSION mk-cni
CNI protocol versions supported: %v
`

// Main handles one CNI call other than VERSION, which package version has answered
// before, and returns the exit code: 0, or 1 with an error
// object on standard output.
func Main(h Host) int {
	if os.Getenv("CNI_COMMAND") == "" {
		_, _ = fmt.Fprintf(os.Stderr, usage, h.Version, version.Supported)
		return 0 // as the library's plugins do
	}
	if h.dial == nil {
		h.dial = dial
	}
	out, err := claimStdout()
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "mk-cni:", err)
		return 1
	}
	// A caller that went away must not kill us in the middle of an ADD: writing then
	// fails, and the ADD is taken back. Caught, not ignored: an ignored signal would
	// stay so in a delegate that we start.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer stop()
	p := &process{host: h, out: out, ctx: ctx}
	return p.run()
}

// process is the life of one call outside its verb: input in, one document out.
type process struct {
	host    Host
	out     *os.File
	ctx     context.Context // of the whole process, which is one call
	stdin   []byte
	settled bool // the verb succeeded and its document, if any, is out
}

func (p *process) run() (code int) {
	defer func() {
		if r := recover(); r != nil {
			_, _ = fmt.Fprintf(os.Stderr, "mk-cni: panic: %v\n%s", r, debug.Stack())
			if p.settled { // what is done is done, and a second document would deny it
				code = 0
				return
			}
			code = p.fail(types.NewError(CodeInternal, fmt.Sprintf("mk-cni met a defect of its own (panic): %v; please report it with what it wrote to standard error", r), ""))
		}
	}()
	stdin, err := input.Read(0, stdinSilence)
	if err != nil {
		code := types.ErrIOFailure
		if errors.Is(err, input.ErrTooLarge) {
			code = types.ErrDecodingFailure
		}
		return p.fail(types.NewError(code, err.Error(), ""))
	}
	p.stdin = stdin
	c := newCall(p.ctx, p.host)
	defer c.close()
	if err := p.dispatch(c); err != nil {
		c.finish(err)
		return p.fail(err)
	}
	if code := p.print(c.output); code != 0 {
		c.callerGone()
		return code
	}
	p.settled = true
	c.finish(nil)
	return 0
}

// dispatch has the library check the environment, the name and the version and
// call the verb. Two things are settled before, because the library does them too
// late or too strictly: it looks at a namespace that is our own only after the verb
// (we before), and it wants CNI_PATH also where the specification does not.
func (p *process) dispatch(c *call) *types.Error {
	c.netnsOverride = truthy(os.Getenv("CNI_NETNS_OVERRIDE"))
	c.path, c.environ = os.Getenv("CNI_PATH"), os.Environ()
	err := os.Setenv("CNI_NETNS_OVERRIDE", "1")
	if c.path == "" {
		err = errors.Join(err, os.Setenv("CNI_PATH", "/nonexistent"))
	}
	if err != nil {
		return types.NewError(CodeInternal, err.Error(), "")
	}
	in, err := input.AsFile(p.stdin)
	if err != nil {
		return types.NewError(types.ErrIOFailure, err.Error(), "")
	}
	defer func() { _ = in.Close() }()
	os.Stdin = in
	verb := func(name string, f func() error) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error {
			if err := c.begin(name, args); err != nil {
				return cniError(err)
			}
			if err := f(); err != nil {
				return cniError(err)
			}
			return nil
		}
	}
	return skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add:    verb("ADD", c.add),
		Check:  verb("CHECK", c.check),
		Del:    verb("DEL", c.del),
		GC:     verb("GC", c.gc),
		Status: verb("STATUS", c.status),
	}, cniversion.PluginSupports(version.Supported...), "")
}

func truthy(s string) bool {
	switch s {
	case "1", "true", "TRUE", "True":
		return true
	}
	return false
}

// fail prints the error object.
func (p *process) fail(e *types.Error) int {
	p.print(errorDocument(version.OfInput(p.stdin), e))
	return 1
}

// print writes the one document; it is the only place that does.
func (p *process) print(doc []byte) int {
	if len(doc) == 0 {
		return 0
	}
	if _, err := p.out.Write(doc); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "mk-cni: write standard output:", err)
		return 1
	}
	resultPrinted.Here()
	return 0
}
