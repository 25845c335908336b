package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/mknetd/internal/doctor"
)

// The exit status is that of the worst finding; with mknetd down too.
func TestDoctorStatus(t *testing.T) {
	dir := t.TempDir()
	injected := filepath.Join(dir, "net.d", "mknet")
	if err := os.MkdirAll(injected, 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put(filepath.Join(dir, "mk-cni"), "")
	put(filepath.Join(dir, "net.d", "10-mknet.conflist"), `{"name":"mknet","plugins":[{"type":"mk-cni"}],"disableCheck":true}`)
	flags := []string{"--config", write(t, ""), "--cni-conf-dir", dir + "/net.d", "--cni-bin-dir", dir, "--socket", dir + "/s"}
	doctorOf := func(more ...string) (int, string, string) {
		return run(t, Program{}, append(append([]string{"doctor"}, flags...), more...)...)
	}
	for _, c := range []struct {
		name   string
		prep   func()
		args   []string
		status int
		want   []string
	}{
		{"nothing", nil, []string{"--check", "cni-binaries,kernel"}, ExitOK, []string{"2 checks", "0 errors, 0 warnings"}},
		{"a note", nil, []string{"--check", "cni-check"}, ExitOK, []string{"NOTE: disableCheck", "why:", "do:", "1 notes"}},
		{"a warning", func() { put(filepath.Join(injected, "x.conf"), "{}") }, []string{"--check", "cni-injected,cni-check"}, ExitWarnings, []string{"WARNING: network \"mknet\"", "NOTE:"}},
		{"an error", nil, []string{"--check", "daemon,cni-injected"}, ExitErrors, []string{"mknetd down", "ERROR: mknetd does not answer", "WARNING:"}},
		{"the table of checks", nil, []string{"--list"}, ExitOK, []string{"base-chains", "no base chain of somebody else"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.prep != nil {
				c.prep()
			}
			status, out, errs := doctorOf(c.args...)
			if status != c.status {
				t.Errorf("status %d, want %d\n%s%s", status, c.status, out, errs)
			}
			for _, w := range c.want {
				if !strings.Contains(out, w) {
					t.Errorf("lacks %q:\n%s", w, out)
				}
			}
		})
	}
	status, out, _ := doctorOf("--check", "daemon", "-o", "json")
	var r doctor.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || status != ExitErrors || len(r.Findings) != 1 || r.Findings[0].Check != "daemon" || r.Daemon != "down" {
		t.Errorf("status %d, %v: %s", status, err, out)
	}
	if status, _, errs := doctorOf("--check", "tea-leaves"); status != ExitUsage || !strings.Contains(errs, "tea-leaves") {
		t.Errorf("an unknown check: status %d, %s", status, errs)
	}
	bundle := filepath.Join(dir, "b.tgz")
	if status, _, errs := doctorOf("--check", "kernel", "--bundle", bundle); status != ExitOK || !strings.Contains(errs, "wrote "+bundle) {
		t.Errorf("bundle: status %d, %s", status, errs)
	}
	if fi, err := os.Stat(bundle); err != nil || fi.Mode().Perm() != 0o600 || fi.Size() < 100 {
		t.Errorf("bundle: %v, %v", fi, err)
	}
	// A file that is there is never written over.
	if status, _, errs := doctorOf("--check", "kernel", "--bundle", bundle); status != ExitErrors || !strings.Contains(errs, "file exists") {
		t.Errorf("bundle again: status %d, %s", status, errs)
	}
}
