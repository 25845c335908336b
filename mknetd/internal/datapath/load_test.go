package datapath

import "testing"

// A load costs the verifier a small part of what it allows (1,000,000
// instructions, kernel/bpf/verifier.c: BPF_COMPLEXITY_LIMIT_INSNS).
func TestVerifierCost(t *testing.T) {
	d := open(t, Config{})
	costs, err := d.VerifierCosts()
	if err != nil {
		t.Fatal(err)
	}
	if len(costs) != len(d.names) {
		t.Fatalf("got costs of %d programs, want %d", len(costs), len(d.names))
	}
	measured, err := MeasureVerifier()
	if err != nil {
		t.Fatal(err)
	}
	if len(measured) != len(costs) {
		t.Errorf("measured %v", measured)
	}
	for _, c := range append(costs, measured...) {
		t.Log(c)
		if c.Instructions == 0 || c.Instructions > VerifierLimit/20 {
			t.Errorf("%s: %d instructions, want 1 to %d", c.Program, c.Instructions, VerifierLimit/20)
		}
	}
}
