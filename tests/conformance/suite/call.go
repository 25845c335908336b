package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// callTimeout ends a plugin that hangs. The slowest answer that the project
// allows itself is 20 s.
const callTimeout = 60 * time.Second

// Call is one execution of the plugin, as a runtime would do it. Change its
// fields before Do.
type Call struct {
	Env   map[string]string // a key with the value unset is left out
	Conf  Conf
	Stdin []byte // replaces the configuration when not nil

	p *Probe
}

// unset marks a variable that is not to be in the environment at all.
const unset = "\x00"

// Reply is what came back.
type Reply struct {
	Exit           int
	Stdout, Stderr []byte
	CPU            time.Duration // user and system
	what           string        // for failures: verb and what was special
}

// with sets keys of the configuration.
func (c *Call) with(more Conf) *Call {
	c.Conf = c.Conf.with(more)
	return c
}

// Do executes the plugin.
func (c *Call) Do() Reply {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.p.driver.Plugin())
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for k, v := range c.Env {
		if v != unset {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	stdin := c.Stdin
	if stdin == nil {
		var err error
		if stdin, err = json.Marshal(c.Conf); err != nil {
			c.p.Fatalf("encode the configuration: %v", err)
		}
	}
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	err := cmd.Run()
	reply := Reply{Stdout: out.Bytes(), Stderr: errs.Bytes(), what: c.Env["CNI_COMMAND"]}
	if cmd.ProcessState != nil {
		reply.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		reply.Exit = exit.ExitCode() // -1: killed by a signal
	case err != nil:
		c.p.Fatalf("%s: run the plugin: %v", reply.what, err)
	}
	if ctx.Err() != nil {
		c.p.Errorf("%s: no answer within %s", reply.what, callTimeout)
	}
	return reply
}

// OK reports success.
func (r Reply) OK() bool { return r.Exit == 0 }

func (r Reply) String() string {
	return fmt.Sprintf("%s: exit %d, stdout %s, stderr %s", r.what, r.Exit, clip(r.Stdout), clip(r.Stderr))
}

func clip(b []byte) string {
	s := strings.Join(strings.Fields(string(b)), " ")
	if len(s) > 400 {
		s = s[:400] + "..."
	}
	return fmt.Sprintf("%q", s)
}

// ErrorObject is the error that CNI SPEC section 5 describes.
type ErrorObject struct {
	CNIVersion string `json:"cniVersion"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// Result is the success of ADD, in the union of all versions' forms.
type Result struct {
	CNIVersion string      `json:"cniVersion"`
	Interfaces []Interface `json:"interfaces"`
	IPs        []struct {
		Version   string `json:"version"` // until 0.4.0
		Address   string `json:"address"`
		Gateway   string `json:"gateway"`
		Interface *int   `json:"interface"`
	} `json:"ips"`
	Routes []map[string]any `json:"routes"`
	DNS    struct {
		Nameservers []string `json:"nameservers"`
		Domain      string   `json:"domain"`
		Search      []string `json:"search"`
		Options     []string `json:"options"`
	} `json:"dns"`

	Raw map[string]any `json:"-"`
}

// Interface is one entry of Result.Interfaces.
type Interface struct {
	Name    string `json:"name"`
	Mac     string `json:"mac"`
	MTU     int    `json:"mtu"` // 1.1.0 on
	Sandbox string `json:"sandbox"`
}

// inSandbox returns the entry of that name that lies in the container.
func (r Result) inSandbox(name string) (Interface, bool) {
	for _, i := range r.Interfaces {
		if i.Name == name && i.Sandbox != "" {
			return i, true
		}
	}
	return Interface{}, false
}

// onHost returns the entries that lie on the host.
func (r Result) onHost() []Interface {
	var out []Interface
	for _, i := range r.Interfaces {
		if i.Sandbox == "" {
			out = append(out, i)
		}
	}
	return out
}

// oneDocument decodes exactly one JSON object from b into each of into.
func oneDocument(b []byte, into ...any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	var raw json.RawMessage
	if err := dec.Decode(&raw); err != nil {
		return fmt.Errorf("not one JSON document: %w", err)
	}
	if err := dec.Decode(new(json.RawMessage)); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON document")
	}
	for _, v := range into {
		if err := json.Unmarshal(raw, v); err != nil {
			return err
		}
	}
	return nil
}

// result decodes a successful ADD's answer or ends the check.
func (p *Probe) result(r Reply) Result {
	if !r.OK() {
		p.Fatalf("want success, got %s", r)
	}
	var out Result
	if err := oneDocument(r.Stdout, &out, &out.Raw); err != nil {
		p.Fatalf("%s: %v", r, err)
	}
	return out
}

// refused checks that the call failed with one error object and returns it.
func (p *Probe) refused(about string, r Reply) ErrorObject {
	var e ErrorObject
	if r.OK() {
		p.Errorf("%s: want an error, got %s", about, r)
		return e
	}
	if r.Exit < 0 {
		p.Errorf("%s: the plugin was killed by a signal: %s", about, r)
		return e
	}
	if err := oneDocument(r.Stdout, &e); err != nil {
		p.Errorf("%s: error object: %v: %s", about, err, r)
	} else if e.Msg == "" {
		p.Errorf("%s: the error object has no msg: %s", about, r)
	}
	return e
}

// succeeds records a failure unless the call went well.
func (p *Probe) succeeds(about string, r Reply) {
	if !r.OK() {
		p.Errorf("%s: want success, got %s", about, r)
	}
}

// fails records a failure unless the call reported an error.
func (p *Probe) fails(about string, r Reply) { _ = p.refused(about, r) }
