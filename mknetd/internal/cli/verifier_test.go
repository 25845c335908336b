package cli

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
)

func TestVerifierCheck(t *testing.T) {
	cost := func(percent float64) []VerifierCost {
		return []VerifierCost{{"from_container", 1000, 1_000_000, 0.1}, {"to_container", uint32(percent * 10_000), 1_000_000, percent}}
	}
	for _, c := range []struct {
		name     string
		args     []string
		costs    []VerifierCost
		err      error
		status   int
		out, say string
	}{
		{"below the limit", nil, cost(5), nil, ExitOK, "to_container    50000         1000000  5.00", ""},
		{"over the limit", nil, cost(5.1), nil, ExitDiffers, "5.10", "1 programs cost more than 5 %"},
		{"as JSON", []string{"-o", "json"}, cost(1), nil, ExitOK, `"percent": 0.1`, ""},
		{"refused by the kernel", nil, nil, errors.New("invalid argument"), ExitDiffers, "", "invalid argument"},
		{"with an argument", []string{"x"}, nil, nil, ExitUsage, "", "unknown command"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out, say bytes.Buffer
			p := &Program{Stdout: &out, Stderr: &say, Verifier: func() ([]VerifierCost, error) { return c.costs, c.err }}
			if got := p.Run(context.Background(), append([]string{"verifier-check"}, c.args...)); got != c.status {
				t.Errorf("status %d, want %d", got, c.status)
			}
			if !strings.Contains(out.String(), c.out) || !strings.Contains(say.String(), c.say) {
				t.Errorf("said\n%s%s\nlacks %q or %q", out.String(), say.String(), c.out, c.say)
			}
		})
	}
}
