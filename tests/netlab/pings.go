package netlab

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Pings is a ping to the internet that goes on until it is stopped.
type Pings struct {
	cmd   *exec.Cmd
	lines chan string // each answer, with the moment of its arrival in front
	out   *strings.Builder
	done  chan struct{}
}

// StartPings sends an echo request every 20 ms.
func StartPings(t testing.TB, ns *Namespace) *Pings {
	t.Helper()
	p := &Pings{cmd: ns.Command(context.Background(), "ping", "-D", "-O", "-n", "-i", "0.02", InternetAddr), lines: make(chan string, 1), out: new(strings.Builder), done: make(chan struct{})}
	pipe, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			p.out.WriteString(lines.Text() + "\n")
			if strings.Contains(lines.Text(), "bytes from") {
				select {
				case p.lines <- lines.Text():
				default: // only the first is asked for
				}
			}
		}
	}()
	t.Cleanup(func() { p.Stop() })
	return p
}

var arrival = regexp.MustCompile(`^\[(\d+\.\d+)\]`)

// FirstAnswer waits at most limit for an answer and returns the moment of its arrival.
func (p *Pings) FirstAnswer(t testing.TB, limit time.Duration) time.Time {
	t.Helper()
	select {
	case line := <-p.lines:
		m := arrival.FindStringSubmatch(line)
		if m == nil {
			t.Fatalf("ping: no time in %q", line)
		}
		s, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.UnixMicro(int64(s * 1e6))
	case <-time.After(limit):
		t.Fatal("no echo reply came")
		return time.Time{}
	}
}

var sequence = regexp.MustCompile(`bytes from .* icmp_seq=(\d+) `)

// Stop ends the ping and returns how many requests between the first and the last
// that were answered had an answer, and how many had none.
func (p *Pings) Stop() (answered, lost int) {
	_ = p.cmd.Process.Signal(os.Interrupt) // it may have ended
	<-p.done
	_ = p.cmd.Wait() // its status says whether all were answered, which is counted below
	seen := map[int]bool{}
	first, last := 1<<31, 0
	for _, m := range sequence.FindAllStringSubmatch(p.out.String(), -1) {
		n, _ := strconv.Atoi(m[1]) // digits, by the pattern
		seen[n] = true
		first, last = min(first, n), max(last, n)
	}
	return len(seen), max(last-first+1-len(seen), 0)
}
