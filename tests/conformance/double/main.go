// Command double is a small CNI plugin that the conformance suite is tried on: a
// veth pair with an address, a default route and a masquerade rule, correct in
// every item of the list. Its own name switches it:
//
//	double            the plugin, with a "daemon" that is the file DaemonFile
//	double-ipam       an IPAM plugin that logs its calls, see ipam.go
//	double-DEFECT     the plugin with one defect, for example double-gc-noop
//
// A suite that finds nothing wrong with a double that has a defect is wrong
// itself; tests/conformance holds it to that.
//
// It is not a plugin to be used: its state is under /var/lib/cni/double.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// DaemonFile stands for a daemon: while it is missing, the daemon is down.
const daemonFile = "/run/double-daemon"

// defect is what this binary does wrong, from its name.
var defect = strings.TrimPrefix(strings.TrimPrefix(filepath.Base(os.Args[0]), "double"), "-")

func is(name string) bool { return defect == name }

// failure is the error object of CNI SPEC section 5.
type failure struct {
	CNIVersion string `json:"cniVersion,omitempty"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details,omitempty"`
}

func (f *failure) Error() string { return f.Msg }

func failf(code uint, format string, args ...any) error {
	return &failure{Code: code, Msg: fmt.Sprintf(format, args...)}
}

// request is one call, after the environment and standard input were read.
type request struct {
	verb, id, netns, ifname string

	raw        []byte
	version    string
	network    string
	pool       int // addresses of the network
	ipam       string
	dns        json.RawMessage
	prev       *result
	conf       map[string]json.RawMessage
	validKey   bool
	valid      []validAttachment
	hasRuntime bool
}

type validAttachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

var supported = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

func main() {
	if is("ipam") {
		os.Exit(ipamMain())
	}
	r, err := read()
	if err == nil {
		err = r.run()
	}
	if err == nil {
		return
	}
	var f *failure
	if !errors.As(err, &f) {
		f = &failure{Code: 100, Msg: err.Error()}
	}
	if r != nil && !is("no-error-version") {
		f.CNIVersion = r.version
	}
	if is("code-999") {
		f.Code = 999
	}
	out := io.Writer(os.Stdout)
	if is("errors-on-stderr") {
		out = os.Stderr
	}
	_ = json.NewEncoder(out).Encode(f)
	if is("exit-zero") {
		return
	}
	os.Exit(1)
}

func (r *request) run() error {
	switch r.verb {
	case "VERSION":
		return r.versionVerb()
	case "STATUS":
		return r.status()
	case "GC":
		return r.gc()
	case "ADD":
		return r.add()
	case "DEL":
		return r.del()
	case "CHECK":
		return r.check()
	}
	return failf(4, "CNI_COMMAND is %q", r.verb)
}

var identifier = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// read takes the parameters and checks them.
func read() (*request, error) {
	r := &request{verb: os.Getenv("CNI_COMMAND"), id: os.Getenv("CNI_CONTAINERID"), netns: os.Getenv("CNI_NETNS"), ifname: os.Getenv("CNI_IFNAME")}
	var err error
	if r.raw, err = io.ReadAll(os.Stdin); err != nil {
		return r, failf(5, "read stdin: %v", err)
	}
	if err := json.Unmarshal(r.raw, &r.conf); err != nil {
		return r, failf(6, "stdin: %v", err)
	}
	var c struct {
		CNIVersion string             `json:"cniVersion"`
		Name       string             `json:"name"`
		Pool       int                `json:"pool"`
		DNS        json.RawMessage    `json:"dns"`
		Prev       *result            `json:"prevResult"`
		New        *[]validAttachment `json:"cni.dev/valid-attachments"`
		Old        *[]validAttachment `json:"cni.dev/attachments"`
		Runtime    map[string]any     `json:"runtimeConfig"`
		IPAM       struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	if err := json.Unmarshal(r.raw, &c); err != nil {
		return r, failf(6, "stdin: %v", err)
	}
	r.version, r.network, r.pool, r.dns, r.prev, r.ipam = c.CNIVersion, c.Name, c.Pool, c.DNS, c.Prev, c.IPAM.Type
	r.hasRuntime = c.Runtime != nil
	if r.pool == 0 {
		r.pool = 200
	}
	for _, list := range []*[]validAttachment{c.Old, c.New} {
		if list != nil && (list == c.Old || !is("gc-old-key-only")) {
			r.validKey, r.valid = true, *list
		}
	}
	if r.verb == "VERSION" {
		return r, nil
	}
	if mac, ok := c.Runtime["mac"]; ok {
		return r, failf(2, "runtimeConfig: mac %v is not supported", mac)
	}
	if _, ok := r.conf["args"]; ok && is("refuses-args") {
		return r, failf(7, "unknown key args")
	}
	if !r.hasRuntime && is("needs-runtime-config") {
		return r, failf(7, "no runtimeConfig")
	}
	return r, r.validate()
}

func (r *request) validate() error {
	if !slices.Contains(supported, r.version) {
		return failf(1, "cniVersion %q", r.version)
	}
	if !identifier.MatchString(r.network) && !is("any-network") {
		return failf(7, "network name %q", r.network)
	}
	if r.verb == "STATUS" || r.verb == "GC" {
		if r.verb == "STATUS" && is("status-needs-container") && r.id == "" {
			return failf(4, "CNI_CONTAINERID is missing")
		}
		return nil
	}
	if is("guess-params") && r.ifname == "" {
		r.ifname = "eth0"
	}
	for name, value := range map[string]string{"CNI_CONTAINERID": r.id, "CNI_NETNS": r.netns, "CNI_IFNAME": r.ifname} {
		if value == "" && (name != "CNI_NETNS" || r.verb != "DEL" || is("del-needs-netns")) {
			return failf(4, "%s is missing", name)
		}
	}
	if !identifier.MatchString(r.id) && !is("any-id") {
		return failf(4, "CNI_CONTAINERID %q", r.id)
	}
	if n := r.ifname; len(n) > 15 || n == "." || n == ".." || strings.ContainsAny(n, "/:% \t") {
		if !is("any-ifname") {
			return failf(4, "CNI_IFNAME %q", n)
		}
		r.ifname = "odd0" // what the kernel would refuse becomes something else
	}
	return nil
}

func (r *request) versionVerb() error {
	v := r.version
	if is("version-fixed") {
		v = "1.1.0"
	}
	if is("version-writes") {
		if err := os.MkdirAll(stateRoot+"/written", 0o755); err != nil {
			return err
		}
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": v, "supportedVersions": supported})
}
