package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/tests/bench/pods"
	"mknet/tests/bench/report"
)

// The figures of rounds that are given: ours costs 0.9 of the kernel and 5 % more with
// 1,024 rules, the others cost more with each rule.
func TestPolicyFigures(t *testing.T) {
	o := podsOptions{rounds: 3}
	rounds := podRounds{}
	for _, k := range pods.PolicyKinds {
		o.kinds = append(o.kinds, k.Name)
	}
	for _, load := range []float64{1, 3, 2} { // of the machine; it is the same for all kinds of a round
		put := func(kind string, cost float64) {
			rounds[kind] = append(rounds[kind], pods.Sample{"rr-cpu": load * cost, "udp-cpu": load * cost, "new-cpu": load * cost})
		}
		put(pods.Kernel, 10)
		put(pods.Ours, 9)
		for _, rules := range pods.RuleCounts {
			ours := 9.0
			if rules == 1024 {
				ours = 9.45
			}
			put(pods.Policed(pods.Ours, rules), ours)
			put(pods.Policed("iptables", rules), 9+float64(rules)/16)
			put(pods.Policed("nft", rules), 9.2)
		}
	}
	figures := policyFigures(o, rounds)
	by := map[string]report.Figure{}
	for _, f := range figures {
		by[f.Name] = f
	}
	for name, want := range map[string]string{
		"live.kernel.rr-cpu":                     `20 us  none`,
		"live.mknet-1024.rr-cpu/kernel":          `0.945 x <= 1.1 met`,
		"live.mknet-1024.new-cpu/kernel":         `0.945 x  none`,
		"live.iptables-1024.udp-cpu/kernel":      `7.3 x  none`,
		"live.mknet-16.udp-cpu/iptables-16":      `0.9 x <= 1 met`,
		"live.mknet-1024.udp-cpu/nft-1024":       `1.03 x <= 1 not met`,
		"live.mknet.new-cpu.largest/smallest":    `1.05 x <= 1.15 met`,
		"live.iptables.new-cpu.largest/smallest": `7.3 x  none`,
		"live.mknet-128.rr-cpu/iptables-128":     `0.529 x <= 1 met`,
		"live.nft.rr-cpu.largest/smallest":       `1 x  none`,
		"live.mknet.udp-cpu/kernel":              `0.9 x <= 1.1 met`,
	} {
		if got := short(by[name]); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	var out bytes.Buffer
	if err := policyTable(&out, o, figures); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mknet-1024   18.90 (0.94)", "live.mknet-1024.udp-cpu/nft-1024       1.03 x    <= 1     not met"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}
}

// short is a figure on one line.
func short(f report.Figure) string {
	met := "none"
	if f.Met != nil {
		met = map[bool]string{true: "met", false: "not met"}[*f.Met]
	}
	return fmt.Sprintf("%.3g %s %s %s", f.Value, f.Unit, f.Goal, met)
}

// Two parts of a benchmark share a file: the later one replaces its own figures.
func TestAddToFigures(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("BENCH_OUT", dir)
	for _, figures := range [][]report.Figure{
		{{Name: "a", Value: 1, Unit: "x"}},
		{{Name: "b", Value: 2, Unit: "x"}},
		{{Name: "a", Value: 3, Unit: "x"}, {Name: "c", Value: 4, Unit: "x"}},
	} {
		if err := report.Add("both", figures); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := os.ReadFile(filepath.Join(dir, "both.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got []report.Figure
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range got {
		names = append(names, fmt.Sprintf("%s%g", f.Name, f.Value))
	}
	if text := strings.Join(names, " "); text != "b2 a3 c4" {
		t.Errorf("the file has %s, want b2 a3 c4", text)
	}
}
