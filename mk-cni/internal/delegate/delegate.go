// Package delegate runs the IPAM plugin of a configuration (CNI SPEC section 4): it
// finds the program in CNI_PATH, gives it the same environment and the complete
// configuration, bounds it in time and in what it may write, and reads its result.
//
// It does not use the library's package invoke, which waits without bound for
// whoever holds the delegate's standard output, keeps all of it, and links packages
// that VERSION would have to initialise.
package delegate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

const (
	// maxOutputBytes bounds a delegate's document, and what is kept of its standard
	// error for a message.
	maxOutputBytes = 1 << 20
	maxTailBytes   = 512
	// holdDelay is how long a delegate that has ended may leave its output open in
	// the hands of a process that it started.
	holdDelay = time.Second
)

// Plugin is the IPAM plugin of one call.
type Plugin struct {
	Type   string
	Stderr io.Writer // gets what the plugin writes to standard error

	path  string
	env   []string
	stdin []byte
	at    *place
}

// place is where a plugin is told to work instead of in the attachment.
type place struct{ netns, link string }

// NotFoundError is returned by Find where no folder of CNI_PATH has the plugin.
type NotFoundError struct{ Type, Path string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("CNI_PATH %q: has no IPAM plugin %q; install it there", e.Path, e.Type)
}

// Find looks for the plugin in the folders of CNI_PATH, in order. env is the
// caller's environment and stdin its network configuration.
func Find(typ, cniPath string, env []string, stdin []byte) (*Plugin, error) {
	if typ == "" || typ == "." || typ == ".." || strings.ContainsRune(typ, filepath.Separator) {
		return nil, &NotFoundError{typ, cniPath}
	}
	for _, dir := range filepath.SplitList(cniPath) {
		path := filepath.Join(dir, typ)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
			return &Plugin{Type: typ, Stderr: os.Stderr, path: path, env: env, stdin: stdin}, nil
		}
	}
	return nil, &NotFoundError{typ, cniPath}
}

// Error is a failure of the plugin: what it said, or how it ended.
type Error struct {
	Type, Verb string
	Code       uint // the plugin's CNI error code; 0: it gave none
	Msg        string
}

func (e *Error) Error() string {
	if e.Code == 0 {
		return fmt.Sprintf("ipam %s: %s: %s", e.Type, e.Verb, e.Msg)
	}
	return fmt.Sprintf("ipam %s: %s: %s (its code %d)", e.Type, e.Verb, e.Msg, e.Code)
}

// Of returns the plugin as another attachment sees it, for the DEL of what a killed
// caller left.
func (p *Plugin) Of(containerID, ifName string) *Plugin {
	other := *p
	other.env = with(p.env, "CNI_CONTAINERID="+containerID, "CNI_IFNAME="+ifName, "CNI_NETNS=", "CNI_ARGS=")
	return &other
}

// On returns the plugin as working on a link of this host, in the namespace at the
// path: what needs a link, as dhcp does, has none in the attachment yet. Attachments
// stay apart by their container ID, which gets the interface's name behind it.
func (p *Plugin) On(netns, link string) *Plugin {
	other := *p
	other.at = &place{netns, link}
	return &other
}

// environ is the plugin's environment for a verb.
func (p *Plugin) environ(verb string) []string {
	env := with(p.env, "CNI_COMMAND="+verb)
	if p.at == nil {
		return env
	}
	value := func(name string) string {
		for _, e := range env {
			if v, ok := strings.CutPrefix(e, name+"="); ok {
				return v
			}
		}
		return ""
	}
	// CNI_NETNS_OVERRIDE: the namespace is the plugin's own, which it would refuse.
	return with(env, "CNI_CONTAINERID="+value("CNI_CONTAINERID")+"."+value("CNI_IFNAME"),
		"CNI_IFNAME="+p.at.link, "CNI_NETNS="+p.at.netns, "CNI_NETNS_OVERRIDE=1")
}

// with returns the environment with variables replaced.
func with(env []string, set ...string) []string {
	out := make([]string, 0, len(env)+len(set))
	for _, old := range env {
		name, _, _ := strings.Cut(old, "=")
		replaced := false
		for _, s := range set {
			replaced = replaced || strings.HasPrefix(s, name+"=")
		}
		if !replaced {
			out = append(out, old)
		}
	}
	return append(out, set...)
}

// Do runs a verb that has no result.
func (p *Plugin) Do(ctx context.Context, verb string) error {
	_, err := p.run(ctx, verb)
	return err
}

// Add asks for an address. With an error the plugin may have given one all the same:
// the caller runs DEL.
func (p *Plugin) Add(ctx context.Context) (Grant, error) {
	out, err := p.run(ctx, "ADD")
	if err != nil {
		return Grant{}, err
	}
	g, err := parse(out)
	if err != nil {
		return Grant{}, &Error{Type: p.Type, Verb: "ADD", Code: types.ErrUnsupportedField, Msg: err.Error()}
	}
	return g, nil
}

func (p *Plugin) run(ctx context.Context, verb string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, p.path)
	cmd.Env = p.environ(verb)
	cmd.Stdin = bytes.NewReader(p.stdin)
	stdout := &bounded{max: maxOutputBytes}
	said := &bounded{max: maxTailBytes}
	cmd.Stdout, cmd.Stderr = stdout, io.MultiWriter(p.Stderr, said)
	cmd.WaitDelay = holdDelay
	err := cmd.Run()
	fail := func(msg string) error { return &Error{Type: p.Type, Verb: verb, Msg: msg} }
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return nil, &Error{Type: p.Type, Verb: verb, Code: types.ErrTryAgainLater, Msg: "did not answer in time"}
	case errors.As(err, &exit):
		var doc types.Error
		if json.Unmarshal(stdout.data, &doc) == nil && doc.Msg != "" {
			msg := doc.Msg
			if doc.Details != "" {
				msg += "; " + doc.Details
			}
			return nil, &Error{Type: p.Type, Verb: verb, Code: doc.Code, Msg: msg}
		}
		return nil, fail(fmt.Sprintf("%v, and no error object: %q", err, strings.TrimSpace(string(said.data))))
	case err != nil:
		return nil, fail(err.Error())
	case stdout.over:
		return nil, fail(fmt.Sprintf("wrote more than %d bytes", maxOutputBytes))
	}
	return stdout.data, nil
}

// bounded keeps the first bytes of what is written to it.
type bounded struct {
	max  int
	data []byte
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	n := min(len(p), b.max-len(b.data))
	b.data = append(b.data, p[:n]...)
	b.over = b.over || n < len(p)
	return len(p), nil
}
