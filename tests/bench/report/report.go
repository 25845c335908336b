// Package report is what the benchmarks have in common behind the measuring: medians,
// goals and the files for machines.
package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// Figure is one result.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"` // "x" for a ratio
	Goal  string  `json:"goal"` // as Goal.String; empty without one
	Met   *bool   `json:"met"`  // null without a goal
}

// Goal is a bound on a figure.
type Goal struct {
	AtMost bool // else at least
	Bound  float64
}

func (g Goal) String() string {
	bound := strconv.FormatFloat(g.Bound, 'g', -1, 64)
	if g.AtMost {
		return "<= " + bound
	}
	return ">= " + bound
}

// Met reports whether a value keeps the bound.
func (g Goal) Met(value float64) bool {
	if g.AtMost {
		return value <= g.Bound
	}
	return value >= g.Bound
}

// Judge adds a goal to a figure.
func (f Figure) Judge(g Goal) Figure {
	met := g.Met(f.Value)
	f.Goal, f.Met = g.String(), &met
	return f
}

// Median of at least one value; the mean of the middle two where there is no middle.
func Median(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}

// Write writes name.json into the folder that BENCH_OUT names, and does nothing
// without it.
func Write(name string, figures []Figure) error {
	dir := os.Getenv("BENCH_OUT")
	if dir == "" {
		return nil
	}
	raw, err := json.MarshalIndent(figures, "", "  ")
	if err == nil {
		err = errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name+".json"), append(raw, '\n'), 0o644))
	}
	if err != nil {
		return fmt.Errorf("write the figures: %w", err)
	}
	return nil
}

// Add is Write beside what another part of the same benchmark has written: figures of
// its own names are replaced, the others stay.
func Add(name string, figures []Figure) error {
	dir := os.Getenv("BENCH_OUT")
	if dir == "" {
		return nil
	}
	path := filepath.Join(dir, name+".json")
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Write(name, figures)
	}
	if err != nil {
		return fmt.Errorf("add to the figures: %w", err)
	}
	var all []Figure
	if err := json.Unmarshal(raw, &all); err != nil {
		return fmt.Errorf("add to the figures: %s: %w", path, err)
	}
	all = slices.DeleteFunc(all, func(old Figure) bool {
		return slices.ContainsFunc(figures, func(f Figure) bool { return f.Name == old.Name })
	})
	return Write(name, append(all, figures...))
}
