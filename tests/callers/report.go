package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// observed is one line of the trace, see trace/main.go.
type observed struct {
	By          string `json:"by"`
	Plugin      string `json:"plugin"`
	Command     string `json:"command"`
	ContainerID string `json:"containerID"`
	Netns       string `json:"netns"`
	IfName      string `json:"ifname"`
	Args        string `json:"args"`
	CNIVersion  string `json:"cniVersion"`
	PrevResult  bool   `json:"prevResult"`
	Exit        int    `json:"exit"`
	Answer      string `json:"answer"`
}

// report is how one caller went.
type report struct {
	caller   caller
	mode     string   // of the network
	notRun   string   // why it could not run here
	problems []string // steps that went wrong, verbs that never came
	calls    []observed
	left     []string // what it left behind
}

func (r report) failed() bool { return len(r.problems)+len(r.left) > 0 }

// verbs in the order of the table.
var verbs = []string{"VERSION", "STATUS", "ADD", "CHECK", "GC", "DEL"}

// readTrace returns what the plugin under test was sent.
func readTrace(path, plugin string) ([]observed, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []observed
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var o observed
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if o.Plugin == plugin {
			out = append(out, o)
		}
	}
	return out, lines.Err()
}

// judge compares what was seen with what the caller is known to send: a verb that
// never came was not tried, and another version than expected was negotiated.
func (r *report) judge() {
	for _, verb := range verbs {
		want := r.caller.version
		switch {
		case slices.Contains(r.caller.sends, verb):
		case verb == "VERSION":
			continue
		default: // then adopt must have sent it, by libcni
			want = "1.1.0"
		}
		versions, n, _ := r.seen(verb)
		switch {
		case n == 0:
			r.problems = append(r.problems, fmt.Sprintf("%s never reached the plugin", verb))
		case verb != "VERSION" && !slices.Equal(versions, []string{want}):
			r.problems = append(r.problems, fmt.Sprintf("%s came with version %v, want %s", verb, versions, want))
		}
	}
	for _, c := range r.calls {
		refusalWanted := slices.Contains(r.caller.refused, c.Command)
		if c.Exit != 0 && !refusalWanted {
			r.problems = append(r.problems, fmt.Sprintf("%s of %s exited %d: %s", c.Command, c.ContainerID, c.Exit, strings.Join(strings.Fields(c.Answer), " ")))
		}
	}
}

// seen returns the versions, the number of calls and of refusals of one verb. What
// adopt sent counts only where the caller does not send the verb itself.
func (r *report) seen(verb string) (versions []string, n, refused int) {
	for _, c := range r.calls {
		if c.Command != verb || c.By != "" && slices.Contains(r.caller.sends, verb) {
			continue
		}
		n++
		if c.Exit != 0 {
			refused++
		}
		if !slices.Contains(versions, c.CNIVersion) {
			versions = append(versions, c.CNIVersion)
		}
	}
	slices.Sort(versions)
	return versions, n, refused
}

// kinds of leftovers, in the order of the columns.
var kinds = []string{"link", "addr", "route", "rule", "netns", "firewall", "file", "process", "endpoint", "inventory"}

// table prints all reports, the reasons below.
func table(w io.Writer, reports []report) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "caller\tmode\tverb\tversion\tcalls\tresult\tleft: %s\n", strings.Join(kinds, " "))
	for _, r := range reports {
		if r.notRun != "" {
			fmt.Fprintf(tw, "%s\t%s\t-\t-\t-\tnot run\t-\n", r.caller.name, r.mode)
			continue
		}
		for _, verb := range verbs {
			versions, n, refused := r.seen(verb)
			result := "ok"
			switch {
			case n == 0 && verb == "VERSION" && !slices.Contains(r.caller.sends, verb):
				result = "never sent by this caller"
			case n == 0:
				result = "MISSING"
			case refused == 0 && !slices.Contains(r.caller.sends, verb):
				result = "ok, by libcni on the caller's attachments"
			case refused > 0 && slices.Contains(r.caller.refused, verb):
				result = fmt.Sprintf("ok, %d refused as they must be", refused)
			case refused > 0:
				result = fmt.Sprintf("FAILED %d", refused)
			}
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%d\t%s\t%s\n", r.caller.name, r.mode, verb, strings.Join(versions, " "), n, result, r.leftovers(verb))
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, r := range reports {
		if r.notRun != "" {
			fmt.Fprintf(w, "NOT RUN %s %s: %s\n", r.caller.name, r.mode, r.notRun)
		}
		for _, p := range r.problems {
			fmt.Fprintf(w, "FAILED %s %s: %s\n", r.caller.name, r.mode, p)
		}
		for _, l := range r.left {
			fmt.Fprintf(w, "LEFT BEHIND %s %s: %s\n", r.caller.name, r.mode, l)
		}
	}
	return nil
}

// leftovers counts by kind; they belong to the caller's whole run and stand in
// the row of its last verb.
func (r *report) leftovers(verb string) string {
	if verb != "DEL" {
		return ""
	}
	counts := make([]string, len(kinds))
	for i, kind := range kinds {
		n := 0
		for _, line := range r.left {
			if strings.HasPrefix(line, kind+": ") {
				n++
			}
		}
		counts[i] = fmt.Sprint(n)
	}
	return strings.Join(counts, " ")
}
