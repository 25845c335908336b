package main

import (
	"bytes"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"mknet/shim/internal/carrier"
	"mknet/shim/internal/stats"
	"mknet/spec/endpoint"
)

// A shim whose figures cannot be read is told, and hides none of the others.
func TestStatsShowTheOthers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shims")
	good := []endpoint.Generation{{0: 1}, {0: 3}}
	for _, gen := range good {
		stop, err := stats.Serve(t.Context(), dir, gen, func() any { return carrier.Status{Generation: gen} })
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	bad := endpoint.Generation{0: 2} // between the two
	l, err := net.Listen("unix", filepath.Join(dir, bad.String()+".sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("nonsense"))
			_ = conn.Close()
		}
	}()
	for _, output := range []string{"table", "json"} {
		var out bytes.Buffer
		cmd := new(cobra.Command)
		cmd.SetOut(&out)
		err := showStats(cmd, dir, "", output)
		if err == nil || !strings.Contains(err.Error(), bad.String()) {
			t.Errorf("%s: got %v, want an error that names %s", output, err, bad)
		}
		for _, gen := range good {
			if !strings.Contains(out.String(), gen.String()) {
				t.Errorf("%s: %s is not shown:\n%s", output, gen, &out)
			}
		}
	}
}
