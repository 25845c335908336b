package suite

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Report is what one run of the suite found, for machines.
type Report struct {
	Plugins []string `json:"plugins"` // in the order of the columns
	Cells   []Cell   `json:"cells"`
}

// Failed counts the failures of one plugin.
func (r *Report) Failed(plugin string) int {
	n := 0
	for _, c := range r.Cells {
		if c.Plugin == plugin && c.Outcome == Fail {
			n++
		}
	}
	return n
}

// JSON writes the report.
func (r *Report) JSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// Table writes item x plugin; each cell is the outcome in the four versions, one
// word where they agree.
func (r *Report) Table(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "item\tasks\t%s\n", strings.Join(r.Plugins, "\t"))
	for _, c := range Checks() {
		fmt.Fprintf(tw, "%d %s\t%s", c.Item, c.Name, c.Asks)
		for _, plugin := range r.Plugins {
			fmt.Fprintf(tw, "\t%s", r.summary(plugin, c.Item))
		}
		fmt.Fprintln(tw)
	}
	fmt.Fprint(tw, "total\tversions passed, failed, n/a")
	for _, plugin := range r.Plugins {
		var n [3]int
		for _, c := range r.Cells {
			if c.Plugin == plugin {
				switch c.Outcome {
				case Pass:
					n[0]++
				case Fail:
					n[1]++
				case NotApplicable:
					n[2]++
				}
			}
		}
		fmt.Fprintf(tw, "\t%d, %d, %d", n[0], n[1], n[2])
	}
	fmt.Fprintln(tw)
	return tw.Flush()
}

// Markdown writes the same table for a document.
func (r *Report) Markdown(w io.Writer) error {
	var b strings.Builder
	row := func(cells ...string) { b.WriteString("| " + strings.Join(cells, " | ") + " |\n") }
	row(append([]string{"item", "asks"}, r.Plugins...)...)
	row(strings.Split(strings.Repeat("---,", len(r.Plugins)+1)+"---", ",")...)
	for _, c := range Checks() {
		cells := []string{fmt.Sprint(c.Item), c.Asks}
		for _, plugin := range r.Plugins {
			cells = append(cells, r.summary(plugin, c.Item))
		}
		row(cells...)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// summary is one cell of the table.
func (r *Report) summary(plugin string, item int) string {
	var parts []string
	same := true
	for _, c := range r.Cells {
		if c.Plugin != plugin || c.Item != item || c.Outcome == Absent {
			continue
		}
		parts = append(parts, c.Version+" "+string(c.Outcome))
		same = same && strings.HasSuffix(parts[0], " "+string(c.Outcome))
	}
	switch {
	case len(parts) == 0:
		return string(Absent)
	case same:
		_, outcome, _ := strings.Cut(parts[0], " ")
		return outcome
	}
	return strings.Join(parts, ", ")
}

// Reasons writes why the failures failed and why items are not applicable.
func (r *Report) Reasons(w io.Writer) {
	for _, c := range r.Cells {
		if c.Outcome == Fail || c.Outcome == NotApplicable {
			fmt.Fprintf(w, "%s  %d %s  %s  %s\n", c.Plugin, c.Item, c.Name, c.Version, c.Outcome)
			for _, reason := range c.Reasons {
				fmt.Fprintf(w, "    %s\n", reason)
			}
		}
	}
}
