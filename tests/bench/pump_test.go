package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mknet/tests/bench/link"
	"mknet/tests/bench/report"
	"mknet/tests/bench/side"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == side.Command {
		os.Exit(side.Main(os.Args[2:]))
	}
	netlab.Main(m)
}

// TestPumpRound runs one very short round and looks whether all figures are there
// and possible. How fast anything is does not matter.
func TestPumpRound(t *testing.T) {
	netlab.Clean(t)
	t.Setenv("BENCH_OUT", t.TempDir())
	t.Setenv("HOME", t.TempDir()) // no agent is built there, which is no error
	links, err := pick([]string{side.Full, link.Urgent, side.Naive})
	if err != nil {
		t.Fatal(err)
	}
	var out, notes bytes.Buffer
	status, err := runPump(pumpOptions{rounds: 1, window: 150 * time.Millisecond, limit: time.Hour, links: links}, &out, &notes)
	if err != nil || status != 0 {
		t.Fatalf("status %d, %v\n%s", status, err, notes.String())
	}
	raw, err := os.ReadFile(filepath.Join(os.Getenv("BENCH_OUT"), "pump.json"))
	if err != nil {
		t.Fatal(err)
	}
	var figures []report.Figure
	if err := json.Unmarshal(raw, &figures); err != nil {
		t.Fatal(err)
	}
	// The least and the most that any machine could show.
	bounds := map[string][2]float64{
		"tcp-out": {1e-4, 1e3}, "tcp-in": {1e-4, 1e3}, "tcp-out-4": {1e-4, 1e3}, "tcp-in-4": {1e-4, 1e3},
		"tcp": {1e-4, 1e3}, "load-tcp-4": {1e-4, 1e3}, "cpu": {1e-4, 1e3}, "udp": {10, 1e8},
		"rtt": {1, 1e7}, "load-rtt": {1, 1e7}, "load-rtt-p99": {1, 1e7}, "load-loss": {0, 99}, "memory": {1, 1e3},
	}
	if len(bounds) != len(link.Measures) {
		t.Errorf("bounds for %d measures, there are %d", len(bounds), len(link.Measures))
	}
	by := map[string]report.Figure{}
	for _, f := range figures {
		by[f.Name] = f
	}
	for _, k := range links {
		for _, m := range link.Measures {
			name := k.Name + "." + m.Name
			f, ok := by[name]
			switch b := bounds[m.Name]; {
			case !ok:
				t.Errorf("no figure %s", name)
			case f.Unit != m.Unit || f.Value < b[0] || f.Value > b[1]:
				t.Errorf("%s is %g %s, want %g to %g %s", name, f.Value, f.Unit, b[0], b[1], m.Unit)
			}
			if !strings.Contains(out.String(), k.Name) {
				t.Errorf("no line of %s in\n%s", k.Name, out.String())
			}
		}
	}
	for _, g := range pumpGoals {
		_, ok := by[g.name()]
		measurable := g.against == "" || g.against == naive
		switch f := by[g.name()]; {
		case ok != measurable:
			t.Errorf("goal %s has a figure: %t, want %t", g.name(), ok, measurable)
		case ok && (f.Met == nil || *f.Met != g.Met(f.Value) || f.Goal != g.String()):
			t.Errorf("goal %s is %+v", g.name(), f)
		}
	}
	if n := strings.Count(out.String(), "not measured"); n != 7 {
		t.Errorf("%d goals without a measurement, want 7:\n%s", n, out.String())
	}
}

// TestFailedLinkIsReported measures a peer whose program is nowhere.
func TestFailedLinkIsReported(t *testing.T) {
	netlab.Clean(t)
	t.Setenv("HOME", t.TempDir())
	links, err := pick([]string{"wireguard-go"})
	if err != nil {
		t.Fatal(err)
	}
	var out, notes bytes.Buffer
	status, err := runPump(pumpOptions{rounds: 2, window: 50 * time.Millisecond, limit: time.Hour, links: links}, &out, &notes)
	if err != nil || status != 0 {
		t.Errorf("status %d, %v: a missing peer is no failure", status, err)
	}
	if !strings.Contains(out.String(), "not measured in full: wireguard-go: start: wireguard") || strings.Count(notes.String(), "wireguard-go") != 1 {
		t.Errorf("out:\n%s\nnotes:\n%s", out.String(), notes.String())
	}
}

func TestMediansAndRatios(t *testing.T) {
	rounds := []round{
		{"full": {"tcp": 9, "load-loss": 0}, naive: {"tcp": 1}},
		{"full": {"tcp": 8, "load-loss": 3}, naive: {"tcp": 2}},
		{"full": {"tcp": 1, "load-loss": 0}},
		{naive: {"tcp": 5}},
	}
	for _, c := range []struct {
		name string
		got  func() (float64, bool)
		want float64
		ok   bool
	}{
		{"median", func() (float64, bool) { return value(rounds, "full", "tcp") }, 8, true},
		{"ratio within rounds", func() (float64, bool) { return ratio(rounds, "full", "tcp", naive) }, 6.5, true},
		{"loss is a mean", func() (float64, bool) { return value(rounds, "full", "load-loss") }, 1, true},
		{"nothing", func() (float64, bool) { return value(rounds, "full", "udp") }, 0, false},
		{"no base", func() (float64, bool) { return ratio(rounds, "full", "tcp", "socat") }, 0, false},
	} {
		if v, ok := c.got(); ok != c.ok || math.Abs(v-c.want) > 1e-9 {
			t.Errorf("%s: %g, %t, want %g, %t", c.name, v, ok, c.want, c.ok)
		}
	}
}

func TestParsePump(t *testing.T) {
	for _, c := range []struct {
		args   string
		links  int
		rounds int
		fails  bool
	}{
		{"", len(link.Links), 5, false},
		{"-quick", 7, 2, false},
		{"-quick -only naive,socat", 2, 2, false},
		{"-rounds 7 -seconds 2", len(link.Links), 7, false},
		{"-only naif", 0, 0, true},
		{"-rounds 0", 0, 0, true},
	} {
		o, err := parsePump(strings.Fields(c.args))
		if c.fails {
			if err == nil {
				t.Errorf("%q: no error", c.args)
			}
			continue
		}
		if err != nil || len(o.links) != c.links || o.rounds != c.rounds {
			t.Errorf("%q: %d links, %d rounds, %v, want %d, %d", c.args, len(o.links), o.rounds, err, c.links, c.rounds)
		}
	}
}
