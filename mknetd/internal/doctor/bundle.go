package doctor

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"mknet/spec/api"
	"mknet/spec/client"
)

// A bundle is for somebody who cannot log in.
const (
	commandTime   = 10 * time.Second
	maxPartBytes  = 16 << 20 // of one file of the bundle; the rest is cut
	redactedValue = "(left out)"
)

// commands are what the bundle has of the kernel's own state.
var commands = []struct{ file, line string }{
	{"host/ip-link.txt", "ip -d link show"},
	{"host/ip-addr.txt", "ip addr show"},
	{"host/ip-rule.txt", "ip rule show"},
	{"host/ip-route.txt", "ip route show table all"},
	{"host/ip-neigh.txt", "ip neigh show"},
	{"host/iptables-nft.txt", "iptables-nft-save -c"},
	{"host/sysctl-ipv4.txt", "sysctl net.ipv4"},
	{"host/netstat.txt", "nstat -az"},
	{"host/uname.txt", "uname -a"},
}

// Bundle writes a gzipped tar of the report and of what it goes by: configuration,
// CNI networks, records, inventory, metrics, events and the kernel's tables.
// Secrets are left out: values of keys that look like one, in configuration and
// CNI networks, whatever plugin they belong to. Records hold none. What cannot be
// had has a line in errors.txt.
func (n *Node) Bundle(ctx context.Context, to io.Writer, r Report) error {
	zip := gzip.NewWriter(to)
	b := &bundle{tar: tar.NewWriter(zip), at: r.At}
	b.json("report.json", r, nil)
	if text, err := os.ReadFile(n.ConfigAt); err == nil || !os.IsNotExist(err) {
		b.part("config.yaml", []byte(redactYAML(string(text))), err)
	}
	files, err := filepath.Glob(filepath.Join(n.confDir(), "*"))
	b.failed(n.confDir(), err)
	more, err := filepath.Glob(filepath.Join(n.confDir(), "*", "*.conf"))
	b.failed(n.confDir(), err)
	for _, f := range append(files, more...) {
		if fi, err := os.Stat(f); err != nil || !fi.Mode().IsRegular() {
			continue
		}
		text, err := os.ReadFile(f)
		b.part("cni/"+strings.ReplaceAll(strings.TrimPrefix(f, n.confDir()+"/"), "/", "_"), redactJSON(text), err)
	}
	if n.daemonErr == nil {
		list, err := n.client.Endpoints(ctx, client.Filter{})
		b.json("endpoints.json", list, err)
		inv, err := n.client.Inventory(ctx)
		b.json("inventory.json", inv, err)
		text, err := n.client.Metrics(ctx)
		b.part("metrics.txt", text, err)
		events, err := n.client.Events(ctx, api.EventsAfter{})
		b.json("events.json", events, err)
		b.json("in-force.json", n.inForce, nil)
	}
	for _, c := range commands {
		out, err := output(ctx, strings.Fields(c.line))
		b.part(c.file, out, err)
	}
	if text, err := n.rules(ctx, "legacy"); text != "" || err != nil {
		b.part("host/iptables-legacy.txt", []byte(text), err)
	}
	b.part("errors.txt", []byte(strings.Join(b.errors, "\n")+"\n"), nil)
	if b.err == nil {
		b.err = b.tar.Close()
	}
	if b.err == nil {
		b.err = zip.Close()
	}
	return b.err
}

func output(ctx context.Context, argv []string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = time.Second
	return cmd.Output()
}

type bundle struct {
	tar    *tar.Writer
	at     time.Time
	errors []string
	err    error // of writing: the bundle is broken
}

// failed notes what could not be had.
func (b *bundle) failed(what string, err error) {
	if err != nil {
		b.errors = append(b.errors, what+": "+err.Error())
	}
}

// part adds one file.
func (b *bundle) part(name string, content []byte, err error) {
	if b.failed(name, err); err != nil || b.err != nil {
		return
	}
	if len(content) > maxPartBytes {
		content = append(content[:maxPartBytes:maxPartBytes], "\n(cut)\n"...)
	}
	b.err = b.tar.WriteHeader(&tar.Header{Name: "mknet/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: b.at})
	if b.err == nil {
		_, b.err = b.tar.Write(content)
	}
}

func (b *bundle) json(name string, v any, err error) {
	var text []byte
	if err == nil {
		text, err = json.MarshalIndent(v, "", "  ")
	}
	b.part(name, text, err)
}

// secret matches keys whose values are left out.
var secret = regexp.MustCompile(`(?i)(token|secret|passw|passphrase|credential|private|psk|auth|bearer|apikey|api-key|keydata|key-data|cookie)`)

// redactJSON leaves out the values of keys that look like a secret's. What is no
// JSON is left out whole.
func redactJSON(text []byte) []byte {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var doc any
	if err := dec.Decode(&doc); err != nil {
		return []byte(fmt.Sprintf("%s: is no JSON: %v\n", redactedValue, err))
	}
	out, err := json.MarshalIndent(redact(doc), "", "  ")
	if err != nil {
		return []byte(redactedValue + "\n")
	}
	return append(out, '\n')
}

func redact(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if secret.MatchString(key) {
				v[key] = redactedValue
				continue
			}
			v[key] = redact(value)
		}
	case []any:
		for i := range v {
			v[i] = redact(v[i])
		}
	}
	return v
}

// keyLine is a line of YAML that sets a key.
var keyLine = regexp.MustCompile(`^(\s*(?:- )?["']?[\w.-]+["']?\s*:)(.*)$`)

// redactYAML does it for mknetd's own file, line by line, so that comments and
// faults stay as they are: it may be one that cannot be parsed.
func redactYAML(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if m := keyLine.FindStringSubmatch(line); m != nil && secret.MatchString(m[1]) {
			line = m[1] + " " + redactedValue
		}
		out = append(out, line)
	}
	return strings.Join(out, "\n") + "\n"
}
