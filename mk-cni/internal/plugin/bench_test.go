package plugin

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// BenchmarkExec compares what a call costs with what executing any Go program
// costs: CPU time (user and system), page faults (which other load does not
// change) and wall time of the process.
//
//	go test -run xxx -bench Exec -benchtime 300x ./mk-cni/internal/plugin/
func BenchmarkExec(b *testing.B) {
	dir := b.TempDir()
	hello := filepath.Join(dir, "hello")
	src := "package main\n\nimport \"os\"\n\nfunc main() { _, _ = os.Stdout.WriteString(\"{}\\n\") }\n"
	if err := os.WriteFile(hello+".go", []byte(src), 0o600); err != nil {
		b.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-o", hello, hello+".go").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	daemon := startFake(b)
	status := `{"cniVersion":"1.1.0","name":"mknet","type":"mk-cni","socket":"` + daemon.socket + `"}`
	for _, bench := range []struct{ name, program, verb, stdin string }{
		{"hello", hello, "", ""},
		{"VERSION", binary, "VERSION", `{"cniVersion":"1.1.0"}`},
		{"STATUS", binary, "STATUS", status},
	} {
		in := filepath.Join(dir, bench.name+".in")
		if err := os.WriteFile(in, []byte(bench.stdin), 0o600); err != nil {
			b.Fatal(err)
		}
		b.Run(bench.name, func(b *testing.B) {
			var cpu time.Duration
			var faults int64
			for b.Loop() {
				f, err := os.Open(in)
				if err != nil {
					b.Fatal(err)
				}
				cmd := exec.Command(bench.program)
				cmd.Env, cmd.Stdin = []string{"CNI_COMMAND=" + bench.verb}, f
				if out, err := cmd.CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				cpu += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
				if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
					faults += usage.Minflt
				}
				_ = f.Close()
			}
			b.ReportMetric(float64(faults)/float64(b.N), "page-faults/op")
			b.ReportMetric(float64(cpu.Microseconds())/1000/float64(b.N), "cpu-ms/op")
		})
	}
}
