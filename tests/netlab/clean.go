package netlab

import (
	"fmt"
	"os"
	"sort"
	"strings"
	"testing"
	"time"
)

// Clean compares the private host before and after the test: links, addresses,
// routes, rules, namespaces, iptables rules of every table, the tables of traces,
// files below /run and this process's descriptors. Whatever is new at the end fails
// the test. Call it first, so that it is the last cleanup to run.
func Clean(t testing.TB) {
	t.Helper()
	before := snapshot()
	t.Cleanup(func() {
		// Removal in the kernel is asynchronous here and there (a namespace's
		// links go with its last reference), so it is given time.
		deadline := time.Now().Add(20 * time.Second)
		for {
			left := diff(before, snapshot())
			if len(left) == 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
}

// snapshot returns one line for everything that a test could leave behind.
func snapshot() map[string]bool {
	seen := map[string]bool{}
	add := func(kind, text string) {
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				seen[kind+": "+line] = true
			}
		}
	}
	for kind, list := range map[string]func() ([]string, error){"link": links, "addr": addresses, "route": routes, "rule": rules, "nft": traceTables} {
		lines, err := list()
		if err != nil {
			lines = []string{err.Error()}
		}
		add(kind, strings.Join(lines, "\n"))
	}
	for _, save := range []string{"iptables-nft-save", "iptables-legacy-save"} {
		out, err := SavedRules(save)
		if err != nil {
			continue // this flavour is not installed, so it cannot leak
		}
		for line := range strings.Lines(out) {
			switch {
			case strings.HasPrefix(line, "*"), strings.HasPrefix(line, "COMMIT"):
			case strings.HasPrefix(line, ":"): // chains: counters change by themselves
				// Looking at a table already makes its built-in chains.
				if f := strings.Fields(line); f[1] != "ACCEPT" {
					add(save, f[0]+" "+f[1])
				}
			default:
				add(save, line)
			}
		}
	}
	for _, dir := range []string{namespaceDir, "/run"} {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if dir == namespaceDir {
				add("netns", e.Name())
			}
			if e.Name() != "xtables.lock" {
				add("file", dir+"/"+e.Name())
			}
		}
	}
	for _, fd := range descriptors() {
		seen["descriptor: "+fd] = true
	}
	return seen
}

// descriptors names what this process holds open, with a count for equal names;
// the Go runtime's own (epoll, eventfd) are left out.
func descriptors() []string {
	count := map[string]int{}
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || strings.Contains(target, "anon_inode:[event") || strings.HasSuffix(target, "/fd") {
			continue
		}
		if strings.HasPrefix(target, "pipe:") || strings.HasPrefix(target, "socket:") {
			target, _, _ = strings.Cut(target, ":")
		}
		count[target]++
	}
	var names []string
	for name, n := range count {
		for i := range n {
			names = append(names, fmt.Sprintf("%s #%d", name, i+1))
		}
	}
	sort.Strings(names)
	return names
}

func diff(before, after map[string]bool) []string {
	var left []string
	for line := range after {
		if !before[line] {
			left = append(left, line)
		}
	}
	sort.Strings(left)
	return left
}
