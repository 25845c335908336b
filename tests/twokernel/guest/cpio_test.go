package guest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestArchive has busybox's cpio read what we write.
func TestArchive(t *testing.T) {
	if _, err := os.Stat(busybox); err != nil {
		t.Fatalf("%v: install busybox-static (scripts/setup.sh does)", err)
	}
	source := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(source, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	a := NewArchive(&out)
	a.Bytes("/etc/mknet/token", 0o400, []byte("secret"))
	a.Bytes("/etc/mknet/odd", 0o644, []byte("12345"))
	a.Bytes("/etc/empty", 0o644, nil)
	a.File("/bin/program", source)
	a.Link("/bin/other", "program")
	a.Dir("/run")
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.Command(busybox, "cpio", "-i")
	cmd.Dir, cmd.Stdin = dir, &out
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, text)
	}
	for _, f := range []struct {
		path, data string
		mode       os.FileMode
	}{
		{"etc/mknet/token", "secret", 0o400},
		{"etc/mknet/odd", "12345", 0o644},
		{"etc/empty", "", 0o644},
		{"bin/program", "#!/bin/sh\n", 0o755},
		{"bin/other", "#!/bin/sh\n", 0o755},
	} {
		data, err := os.ReadFile(dir + "/" + f.path)
		if err != nil {
			t.Error(err)
			continue
		}
		info, err := os.Stat(dir + "/" + f.path)
		if err != nil || string(data) != f.data || info.Mode().Perm() != f.mode {
			t.Errorf("%s: %q, %v, %v; want %q, %v", f.path, data, info.Mode(), err, f.data, f.mode)
		}
	}
	if target, err := os.Readlink(dir + "/bin/other"); target != "program" {
		t.Errorf("link to %q, %v", target, err)
	}
	if info, err := os.Stat(dir + "/run"); err != nil || !info.IsDir() {
		t.Errorf("run: %v, %v", info, err)
	}
}

func TestArchiveKeepsItsFirstError(t *testing.T) {
	a := NewArchive(&bytes.Buffer{})
	a.File("/a", "/nonexistent/file")
	a.Bytes("/b", 0o644, []byte("b"))
	if err := a.Close(); err == nil {
		t.Error("no error for a file that is not there")
	}
}
