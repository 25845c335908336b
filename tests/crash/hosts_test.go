package crash

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"mknet/tests/node"
)

// Files in a worker's folder.
const (
	visitsFile   = "visits.json"
	outcomesFile = "outcomes.jsonl"
)

// worker is this test binary once more, in a private host of its own.
type worker struct {
	cmd *exec.Cmd
	dir string
	out bytes.Buffer
}

// play has private hosts play one part each, so many side by side, and returns the
// outcomes. A visit without a point is a story without a crash.
func play(t *testing.T, dir string, parts [][]visit, hosts int) []outcome {
	t.Helper()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var all []outcome
	var workers []*worker
	for i, part := range parts {
		if len(workers) == hosts {
			all = append(all, workers[0].end(t)...)
			workers = workers[1:]
		}
		workers = append(workers, startWorker(t, filepath.Join(dir, fmt.Sprint("host-", i)), part))
	}
	for _, w := range workers {
		all = append(all, w.end(t)...)
	}
	return all
}

func startWorker(t *testing.T, dir string, visits []visit) *worker {
	t.Helper()
	doc, err := json.Marshal(visits)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, visitsFile), doc, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	w := &worker{cmd: exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestEveryCrashPoint$", "-test.timeout=0"), dir: dir}
	w.cmd.Env = append(os.Environ(), workEnv+"="+dir)
	w.cmd.Stdout, w.cmd.Stderr = &w.out, &w.out
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return w
}

// end waits for the worker and returns what it found.
func (w *worker) end(t *testing.T) []outcome {
	t.Helper()
	err := w.cmd.Wait()
	if err != nil {
		t.Errorf("a private host: %v\n%s", err, &w.out)
	}
	text, readErr := os.ReadFile(filepath.Join(w.dir, outcomesFile))
	if readErr != nil {
		t.Error(readErr)
	}
	var all []outcome
	for line := range strings.Lines(string(text)) {
		var o outcome
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	return all
}

// work plays a worker's visits, story by story on one node each.
func work(t *testing.T, dir string) {
	text, err := os.ReadFile(filepath.Join(dir, visitsFile))
	var visits []visit
	if err == nil {
		err = json.Unmarshal(text, &visits)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range stories {
		if !slices.ContainsFunc(visits, func(v visit) bool { return v.Story == s.name }) {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			n := node.Prepare(t, `pools: [{name: pods, prefix: 10.91.0.0/24}]`)
			for _, v := range visits {
				if v.Story == s.name {
					playOne(t, n, s, v, filepath.Join(dir, outcomesFile))
				}
			}
		})
	}
}

// tidy takes away what a failed visit has left.
func tidy(t *testing.T, n *node.Node) {
	t.Helper()
	n.Kill(t)
	if out, err := runPurge(n); err != nil {
		t.Errorf("purge: %v\n%s", err, out)
	}
	reset(t, n)
}

// playOne kills at one visit. A step that cannot even be taken counts against
// what was acknowledged.
func playOne(t *testing.T, n *node.Node, s story, v visit, path string) {
	o := &outcome{Visit: v}
	t.Run(strings.ReplaceAll(v.Step+"-"+v.Point, "/", ":"), func(t *testing.T) {
		defer func() {
			if t.Failed() && o.clean() {
				o.fault(acknowledged, "a step failed, see the test's own words")
			}
			o.keep(t, path)
			if !o.clean() {
				t.Error(o)
				tidy(t, n) // the next visit is not to blame
			}
		}()
		if v.Point != "" {
			s.play(t, n, &victim{at: &v}, o)
			return
		}
		record := &victim{dir: t.TempDir()}
		s.play(t, n, record, o)
		o.Visits, o.Declared = record.records(t, s.name)
	})
}
