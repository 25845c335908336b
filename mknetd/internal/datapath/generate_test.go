package datapath

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The committed object is what the sources compile to. It needs the compiler that
// doc.go pins, and skips without it: `make generate` installs it.
func TestObjectIsCurrent(t *testing.T) {
	if _, err := exec.LookPath("clang-14"); err != nil {
		t.Skip("no clang-14 here: run `make generate`, which installs it")
	}
	want, err := os.ReadFile("program_bpfel.o")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.Command("go", "tool", "bpf2go", "-cc", "clang-14", "-strip", "llvm-strip-14",
		"-go-package", "datapath", "-target", "bpfel", "-no-global-types", "-output-dir", dir, "program",
		filepath.Join("bpf", "datapath.c"), "--", "-O2", "-g")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, err := os.ReadFile(filepath.Join(dir, "program_bpfel.o"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("bpf/ changed and program_bpfel.o did not: run `make generate` and commit it")
	}
}
