package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// ipamMain is the IPAM plugin: one address for everybody. In the folder that
// ipam.controlDir names it appends each call to "calls" and reads "fail" (the
// verb that is to fail) and "say" (what to write to standard error).
func ipamMain() int {
	raw, err := io.ReadAll(os.Stdin)
	if err != nil {
		return fail(5, err)
	}
	var c struct {
		CNIVersion string `json:"cniVersion"`
		IPAM       struct {
			ControlDir string `json:"controlDir"`
		} `json:"ipam"`
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return fail(6, err)
	}
	env := map[string]string{}
	for _, kv := range os.Environ() {
		if k, v, _ := strings.Cut(kv, "="); strings.HasPrefix(k, "CNI_") {
			env[k] = v
		}
	}
	verb := env["CNI_COMMAND"]
	if verb == "VERSION" {
		_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": c.CNIVersion, "supportedVersions": supported})
		return 0
	}
	if c.IPAM.ControlDir == "" {
		return fail(7, errors.New("ipam.controlDir is missing"))
	}
	line, err := json.Marshal(map[string]any{"env": env, "stdin": string(raw)})
	if err != nil {
		return fail(6, err)
	}
	f, err := os.OpenFile(filepath.Join(c.IPAM.ControlDir, "calls"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fail(5, err)
	}
	_, err = f.Write(append(line, '\n'))
	if err = errors.Join(err, f.Close()); err != nil {
		return fail(5, err)
	}
	if say, err := os.ReadFile(filepath.Join(c.IPAM.ControlDir, "say")); err == nil {
		fmt.Fprintln(os.Stderr, string(say))
	}
	if bad, err := os.ReadFile(filepath.Join(c.IPAM.ControlDir, "fail")); err == nil && string(bad) == verb {
		return fail(50, fmt.Errorf("%s was told to fail", verb))
	}
	if verb == "ADD" {
		version := ""
		if c.CNIVersion < "1.0.0" {
			version = `"version":"4",`
		}
		fmt.Printf(`{"cniVersion":%q,"ips":[{%s"address":"10.45.0.2/24","gateway":"10.45.0.1"}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{}}`, c.CNIVersion, version)
	}
	return 0
}

func fail(code uint, err error) int {
	_ = json.NewEncoder(os.Stdout).Encode(failure{Code: code, Msg: err.Error()})
	return 1
}

// delegate runs the IPAM plugin with the same environment and configuration.
func (r *request) delegate(verb string) error {
	_, err := r.exec(verb)
	return err
}

func (r *request) exec(verb string) ([]byte, error) {
	path := ""
	for _, dir := range filepath.SplitList(os.Getenv("CNI_PATH")) {
		if p := filepath.Join(dir, r.ipam); path == "" {
			if _, err := os.Stat(p); err == nil {
				path = p
			}
		}
		if is("delegate-first-dir") {
			break
		}
	}
	if path == "" {
		return nil, failf(100, "%s is in no folder of CNI_PATH %s", r.ipam, os.Getenv("CNI_PATH"))
	}
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb)
	stdin := r.raw
	if is("delegate-ipam-only") {
		stdin, _ = json.Marshal(map[string]any{"cniVersion": r.version, "name": r.network, "ipam": r.conf["ipam"]})
	}
	cmd.Stdin = bytes.NewReader(stdin)
	if !is("delegate-mute") {
		cmd.Stderr = os.Stderr
	}
	out, err := cmd.Output()
	if err == nil {
		return out, nil
	}
	var f failure
	if json.Unmarshal(out, &f) == nil && f.Msg != "" {
		return nil, &f
	}
	return nil, failf(100, "%s: %v", r.ipam, err)
}

// delegateAdd gets an address, and gives it back when that fails.
func (r *request) delegateAdd() (netip.Addr, error) {
	out, err := r.exec("ADD")
	if err == nil {
		var res result
		if err = json.Unmarshal(out, &res); err == nil && len(res.IPs) > 0 {
			var p netip.Prefix
			if p, err = netip.ParsePrefix(res.IPs[0].Address); err == nil {
				return p.Addr(), nil
			}
		}
	}
	if !is("delegate-no-undo") {
		err = errors.Join(err, r.delegate("DEL"))
	}
	return netip.Addr{}, err
}
