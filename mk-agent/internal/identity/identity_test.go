package identity

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/shim/session"
	"mknet/spec/pump"
)

const (
	hexToken = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	hexGen   = "0123456789abcdef0123456789abcdef"
)

func TestFromFiles(t *testing.T) {
	dir := t.TempDir()
	id, token := filepath.Join(dir, "id"), filepath.Join(dir, "token")
	write := func(path, text string, mode os.FileMode) {
		t.Helper()
		_ = os.Remove(path)
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	write(token, hexToken+"\n", 0o400)
	read := FromFiles(id, token)
	if _, err := read(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: got %v, want fs.ErrNotExist", err)
	}
	write(id, `{"sandboxID":"s1","sandboxGeneration":"7","endpointGeneration":"`+hexGen+`"}`, 0o644)
	got, err := read()
	if err != nil || got.Identity.Sandbox.String() != "s1@7" || got.Identity.Endpoint.String() != hexGen || got.SingleUse || got.Token[1] != 0x11 {
		t.Errorf("got %+v, %v", got, err)
	}
	write(id, `{"sandboxID":"s1","sandboxGeneration":"8"}`, 0o444)
	if got, err := read(); err != nil || got.Identity.Sandbox.Generation != "8" || !got.Identity.Endpoint.IsZero() {
		t.Errorf("changed file: got %+v, %v", got, err)
	}
	write(token, "short", 0o400)
	if _, err := read(); !errors.As(err, new(*session.TokenFileError)) {
		t.Errorf("short token: got %v", err)
	}
	write(token, hexToken, 0o400)
	for _, tt := range []struct {
		name, text string
		mode       os.FileMode
	}{
		{"empty", "", 0o600},
		{"unknown field", `{"sandboxID":"s","sandboxGeneration":"1","x":1}`, 0o600},
		{"trailing", `{"sandboxID":"s","sandboxGeneration":"1"}{}`, 0o600},
		{"no generation", `{"sandboxID":"s"}`, 0o600},
		{"bad identifier", `{"sandboxID":"../s","sandboxGeneration":"1"}`, 0o600},
		{"bad endpoint", `{"sandboxID":"s","sandboxGeneration":"1","endpointGeneration":"1"}`, 0o600},
		{"long", `{"sandboxID":"s","sandboxGeneration":"1"}` + strings.Repeat(" ", maxFileBytes), 0o600},
		{"others may write", `{"sandboxID":"s","sandboxGeneration":"1"}`, 0o602},
	} {
		write(id, tt.text, tt.mode)
		if got, err := read(); err == nil {
			t.Errorf("%s: got %+v", tt.name, got)
		}
	}
}

func TestParseCmdline(t *testing.T) {
	base := "console=ttyS0 mknet.sandbox=s1 mknet.generation=7 mknet.token=" + hexToken
	c, err := parseCmdline(base + ` mknet.endpoint=` + hexGen + ` mknet.listen="vsock://any:1021" quiet -- mknet.sandbox=init` + "\n")
	if err != nil || c.Identity.Sandbox.String() != "s1@7" || c.Identity.Endpoint.String() != hexGen || c.Listen != "vsock://any:1021" {
		t.Errorf("got %+v, %v", c, err)
	}
	for _, tt := range []struct{ name, in, want string }{
		{"nothing", "quiet", "mknet.sandbox"},
		{"twice", base + " mknet.sandbox=s2", "given twice"},
		{"unknown key", base + " mknet.sandbx=s2", "unknown key"},
		{"no token", "mknet.sandbox=s1 mknet.generation=7", "mknet.token"},
		{"short token", "mknet.sandbox=s1 mknet.generation=7 mknet.token=" + hexToken[:62], "mknet.token"},
		{"32 characters are no raw token", "mknet.sandbox=s1 mknet.generation=7 mknet.token=" + hexToken[:32], "mknet.token"},
		{"token no hex", "mknet.sandbox=s1 mknet.generation=7 mknet.token=" + strings.Repeat("q", 64), "mknet.token"},
		{"bad endpoint", base + " mknet.endpoint=0", "mknet.endpoint"},
		{"long", base + strings.Repeat(" x", maxFileBytes), "longer"},
	} {
		_, err := parseCmdline(tt.in)
		if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), hexToken[:32]) {
			t.Errorf("%s: got %v, want an error with %q and without the token", tt.name, err, tt.want)
		}
	}
}

func TestCmdlineTokenIsUsedOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "cmdline")
	write := func(token string) {
		t.Helper()
		if err := os.WriteFile(path, []byte("mknet.sandbox=s mknet.generation=1 mknet.token="+token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(hexToken)
	state := filepath.Join(dir, "run", "mk-agent")
	c, err := ReadCmdline(path, state)
	if err != nil {
		t.Fatal(err)
	}
	first, err := c.Credentials()
	if err != nil || !first.SingleUse {
		t.Fatalf("first: %v, single use %t", err, first.SingleUse)
	}
	next := pump.Token{9}
	if err := c.Keep(next); err != nil {
		t.Fatal(err)
	}
	for range 2 { // also after a restart of the agent
		if got, err := c.Credentials(); err != nil || got.SingleUse || got.Token != next {
			t.Errorf("after Keep: single use %t, %v", got.SingleUse, err)
		}
		if c, err = ReadCmdline(path, state); err != nil {
			t.Fatal(err)
		}
	}
	names, err := filepath.Glob(filepath.Join(state, "*"))
	if err != nil || len(names) != 1 {
		t.Fatalf("kept %v, %v", names, err)
	}
	if info, err := os.Stat(names[0]); err != nil || info.Mode() != 0o600 {
		t.Errorf("kept file %v, %v; want 0600", info.Mode(), err)
	}
	if info, err := os.Stat(state); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("state folder %v, %v; want 0700", info.Mode(), err)
	}
	// A damaged file does not make the used token good again.
	if err := os.Chmod(names[0], 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Credentials(); err == nil {
		t.Errorf("with a damaged file: single use %t, no error", got.SingleUse)
	}
	// Another boot has another token, to which the kept one does not belong.
	write(strings.Replace(hexToken, "0", "1", 1))
	if c, err = ReadCmdline(path, state); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Credentials(); err != nil || !got.SingleUse {
		t.Errorf("next boot: single use %t, %v", got.SingleUse, err)
	}
	if _, err := ReadCmdline(filepath.Join(dir, "none"), state); err == nil || !strings.Contains(err.Error(), "mount /proc") {
		t.Errorf("no /proc: got %v", err)
	}
}

func FuzzParseCmdline(f *testing.F) {
	f.Add("mknet.sandbox=s mknet.generation=1 mknet.token=" + hexToken)
	f.Add("mknet.sandbox= mknet. -- =")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := parseCmdline(s)
		if err == nil && c.Identity.Sandbox.Validate() != nil {
			t.Fatalf("%q is %+v", s, c)
		}
	})
}
