package operate

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// probeWait is how long an answer is waited for, on a machine that others use too. A
// port that nobody listens on refuses at once, however long that is.
const probeWait = 20 * time.Second

// probe asks as a kubelet and a Prometheus do, over and over, until stop is closed,
// and returns how often, and what went wrong.
func probe(stop <-chan struct{}, base string) (asked int, wrong []string) {
	c := http.Client{Timeout: probeWait, Transport: &http.Transport{DisableKeepAlives: true}}
	for {
		for _, path := range []string{"/readyz", "/healthz", "/metrics"} {
			resp, err := c.Get(base + path)
			if err != nil {
				wrong = append(wrong, err.Error())
				continue
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			asked++
			if err != nil || resp.StatusCode != http.StatusOK || path == "/metrics" && !strings.Contains(string(body), "mknet_ready_bool 1\n") {
				wrong = append(wrong, fmt.Sprintf("%s: %d %v %.200s", path, resp.StatusCode, err, body))
			}
		}
		select {
		case <-stop:
			return asked, wrong
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// A takeover is seen by nobody who asks for health, readiness or metrics: the port
// answers all the time, and in the end it is the successor who does.
func TestMetricsThroughTakeovers(t *testing.T) {
	const base = "http://127.0.0.1:9464"
	n := node.New(t, "metricsAddress: 127.0.0.1:9464")
	n.Add(t, "c1", netlab.New(t), "eth0")
	netlab.Eventually(t, node.Patience, func() error {
		if status, body := get(t, base+"/readyz"); status != http.StatusOK {
			return fmt.Errorf("%d %s", status, body)
		}
		return nil
	})
	stop := make(chan struct{})
	var asked int
	var wrong []string
	var probing sync.WaitGroup
	probing.Go(func() { asked, wrong = probe(stop, base) })
	end := sync.OnceFunc(func() { close(stop); probing.Wait() })
	defer end()
	pids := map[string]bool{startTime(t, base): true}
	for range 3 {
		n.TakeOver(t)
		// The one before may have the last answer; then it lets go of the port.
		netlab.Eventually(t, node.Patience, func() error {
			now := startTime(t, base)
			if pids[now] {
				return fmt.Errorf("the process that began at %s answers", now)
			}
			pids[now] = true
			return nil
		})
	}
	end()
	if len(wrong) > 0 || asked < 20 {
		t.Errorf("asked %d times, wrong were:\n%s", asked, strings.Join(wrong, "\n"))
	}
	t.Logf("3 takeovers, %d answers", asked)
	// After a crash there is nobody to take it from.
	n.Kill(t)
	n.Start(t)
	netlab.Eventually(t, node.Patience, func() error {
		if status, body := get(t, base+"/healthz"); status != http.StatusOK {
			return fmt.Errorf("after a crash: %d %s", status, body)
		}
		return nil
	})
}

// startTime tells daemons apart.
func startTime(t *testing.T, base string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(body)) {
		if at, is := strings.CutPrefix(line, "process_start_time_seconds "); is {
			return strings.TrimSpace(at)
		}
	}
	t.Fatalf("no start time:\n%s", body)
	return ""
}
