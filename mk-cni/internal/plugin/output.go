package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
)

// Versions are the CNI versions that mk-cni speaks, oldest first.
var Versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// claimStdout takes standard output for the one document and gives standard error
// to everybody else who writes to descriptor 1 or os.Stdout.
func claimStdout() (*os.File, error) {
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("standard output: %w", err)
	}
	if err := unix.Dup3(2, 1, 0); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("standard output: %w", err)
	}
	os.Stdout = os.Stderr
	return os.NewFile(uintptr(fd), "stdout"), nil
}

// errorDocument is the error object of CNI SPEC section 5 with cniVersion, which
// the library's type lacks.
func errorDocument(cniVersion string, e *types.Error) []byte {
	// Fields of a struct of strings and a number always marshal.
	doc, _ := json.MarshalIndent(struct {
		CNIVersion string `json:"cniVersion"`
		Code       uint   `json:"code"`
		Msg        string `json:"msg"`
		Details    string `json:"details,omitempty"`
	}{cniVersion, e.Code, limit(e.Msg), limit(e.Details)}, "", "    ")
	return append(doc, '\n')
}

// versionDocument is the answer to VERSION; the library's always says its own
// newest version where the specification wants the caller's.
func versionDocument(cniVersion string) []byte {
	doc, _ := json.MarshalIndent(struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{cniVersion, Versions}, "", "    ")
	return append(doc, '\n')
}

// maxMessageBytes bounds each text of an error: it may repeat hostile input.
const maxMessageBytes = 4096

func limit(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > maxMessageBytes {
		return strings.ToValidUTF8(s[:maxMessageBytes], "") + "..."
	}
	return s
}

// inputVersion is the cniVersion of the input where it can be read and looks like
// a version, else our newest.
func inputVersion(stdin []byte) string {
	newest := Versions[len(Versions)-1]
	var in struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(stdin, &in); err != nil || in.CNIVersion == "" || len(in.CNIVersion) > 32 ||
		strings.Trim(in.CNIVersion, "0123456789abcdefghijklmnopqrstuvwxyz.-+") != "" {
		return newest
	}
	return in.CNIVersion
}
