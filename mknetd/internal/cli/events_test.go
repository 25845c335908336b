package cli

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

func someEvents() []specapi.Event {
	ep := sample("aa112233445566778899aabbccddeeff", endpoint.Ready)
	at := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.Local)
	return []specapi.Event{
		{Instance: "i", Seq: 1, At: at, Kind: specapi.EventDaemon, What: "started", Details: map[string]string{"version": "v1"}},
		{Instance: "i", Seq: 2, At: at, Kind: specapi.EventEndpoint, What: "created", Endpoint: ep.Attachment.String(), Generation: ep.Generation, State: ep.State, Peer: &endpoint.Process{PID: 7, Comm: "mk-cni"}},
		{
			Instance: "i", Seq: 3, At: at, Kind: specapi.EventObject, What: specapi.ObjectRepaired, Generation: ep.Generation,
			Object: &specapi.ChangedObject{Kind: "route", Name: "default dev mkhost0", Where: endpoint.InNamespace}, Details: map[string]string{"was": "missing"},
		},
	}
}

func TestEvents(t *testing.T) {
	flags := started(t, &daemon{events: someEvents()})
	lines := []string{
		"03:04:05.006 -            started   version=v1",
		"03:04:05.006 aa1122334455 created   n/caa/eth0 READY by mk-cni (pid 7)",
		"03:04:05.006 aa1122334455 repaired  route default dev mkhost0 (namespace) was=missing",
	}
	status, out, errs := run(t, Program{}, append([]string{"events"}, flags...)...)
	if status != ExitOK || out != strings.Join(lines, "\n")+"\n" || !strings.Contains(errs, "3 older events are forgotten") {
		t.Errorf("status %d\n%s\n%s", status, out, errs)
	}
	status, out, _ = run(t, Program{}, append([]string{"events", "--generation", "aa11", "-o", "json"}, flags...)...)
	if status != ExitOK || strings.Count(out, "\n") != 2 || !strings.Contains(out, `"what":"repaired"`) {
		t.Errorf("status %d\n%s", status, out)
	}
	if status, _, _ := run(t, Program{}, append([]string{"events", "-o", "yaml"}, flags...)...); status != ExitUsage {
		t.Errorf("yaml: status %d", status)
	}
	if status, _, _ := run(t, Program{}, "events", "--follow", "--socket", "/run/nobody.sock"); status != ExitUnreachable {
		t.Errorf("nobody there: status %d", status)
	}
}

// Follow prints while it goes on, and ends with its context.
func TestFollowEvents(t *testing.T) {
	flags := started(t, &daemon{events: someEvents()})
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	r, w := io.Pipe()
	var errs bytes.Buffer
	p := Program{Version: "v1", Stdout: w, Stderr: &errs}
	ended := make(chan int, 1)
	go func() {
		ended <- p.Run(ctx, append([]string{"events", "-f"}, flags...))
		w.Close()
	}()
	buf := make([]byte, 4096)
	var seen string
	for strings.Count(seen, "\n") < 3 {
		n, err := r.Read(buf)
		if err != nil {
			t.Fatalf("%v after %q", err, seen)
		}
		seen += string(buf[:n])
	}
	stop()
	if status := <-ended; status != ExitOK {
		t.Errorf("status %d: %s", status, errs.String())
	}
}
