// Package version knows the CNI versions and answers VERSION, before anything else
// of the program exists: runtimes ask it all the time (Podman before every verb).
//
// The answer is given in the package's init. Go initialises packages in the order
// of their import paths as soon as what they import is ready (language
// specification, "Program initialization"), so this one comes before net, crypto/tls
// and net/http, whose initialisation costs more than all of VERSION. It must import
// nothing that imports one of them; a test sees to it.
package version

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"mknet/mk-cni/internal/input"
)

// Supported are the CNI versions that mk-cni speaks, oldest first.
var Supported = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// silence is how long standard input may say nothing: VERSION needs no input. A
// shorter time makes the answer wrong where a busy machine holds the caller up
// between its exec and its write.
const silence = 5 * time.Second

func init() {
	if os.Getenv("CNI_COMMAND") != "VERSION" {
		return
	}
	if _, err := os.Stdout.Write(document(OfInput(read(0)))); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "mk-cni: write standard output:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// read reads what a caller may have written. Nothing is required: at the first
// whole JSON value, at silence or on a terminal it is done.
func read(fd int) []byte {
	if input.IsTerminal(fd) {
		return nil
	}
	data, _ := input.ReadUntil(fd, silence, json.Valid)
	return data
}

// document is the answer; the library's always says its own newest version where
// the specification wants the caller's.
func document(cniVersion string) []byte {
	doc, _ := json.MarshalIndent(struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{cniVersion, Supported}, "", "    ")
	return append(doc, '\n')
}

// OfInput is the cniVersion of a network configuration where it can be read and
// looks like a version, else our newest.
func OfInput(stdin []byte) string {
	newest := Supported[len(Supported)-1]
	var in struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(stdin, &in); err != nil || in.CNIVersion == "" || len(in.CNIVersion) > 32 ||
		strings.Trim(in.CNIVersion, "0123456789abcdefghijklmnopqrstuvwxyz.-+") != "" {
		return newest
	}
	return in.CNIVersion
}
