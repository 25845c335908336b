package datapath

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"mknet/tests/netlab"
)

// The committed object is what the sources compile to, by the compiler that doc.go
// pins.
func TestObjectIsCurrent(t *testing.T) {
	for _, tool := range []string{"clang-14", "llvm-strip-14"} {
		if _, err := exec.LookPath(tool); err != nil {
			netlab.Missing(t, err, "scripts/setup.sh scripts/bpf-packages.txt")
		}
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
