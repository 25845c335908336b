package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
)

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

// maxMessageBytes bounds each text of an error: it may repeat hostile input.
const maxMessageBytes = 4096

func limit(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > maxMessageBytes {
		return strings.ToValidUTF8(s[:maxMessageBytes], "") + "..."
	}
	return s
}
