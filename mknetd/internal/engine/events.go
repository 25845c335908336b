package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"mknet/mknetd/internal/metrics"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Bounds of what is remembered, and of what a follower may be behind. An ADD and
// its DEL make about 60 events.
const (
	eventRing     = 8192
	followerQueue = 1024
)

// eventLog remembers the last events and passes new ones to followers. Nobody
// waits for a follower: one that does not keep up loses events and is told how
// many.
type eventLog struct {
	instance string

	mu        sync.Mutex
	ring      []api.Event // grows to eventRing, then seq%eventRing is the place
	last      uint64      // seq of the newest
	lost      uint64      // by all followers
	followers map[*follower]bool
}

type follower struct {
	queue chan api.Event
	lost  uint64 // since the last event in the queue
}

func newEventLog() eventLog {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return eventLog{instance: hex.EncodeToString(b[:]), followers: map[*follower]bool{}}
}

// add numbers an event, keeps it and passes it on.
func (l *eventLog) add(ev api.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	ev.Instance, ev.Seq, ev.At = l.instance, l.last, time.Now()
	if len(l.ring) < eventRing {
		l.ring = append(l.ring, ev)
	} else {
		l.ring[(l.last-1)%eventRing] = ev
	}
	for f := range l.followers {
		f.pass(ev, &l.lost)
	}
}

// pass puts an event into the queue, behind a note of what was lost before it.
// Only add sends, so that room that is seen stays.
func (f *follower) pass(ev api.Event, lost *uint64) {
	need := 1
	if f.lost > 0 {
		need = 2
	}
	if cap(f.queue)-len(f.queue) < need {
		f.lost++
		*lost++
		return
	}
	if f.lost > 0 {
		f.queue <- lostEvent(ev, f.lost)
		f.lost = 0
	}
	f.queue <- ev
}

// lostEvent stands for n events in front of ev.
func lostEvent(ev api.Event, n uint64) api.Event {
	return api.Event{
		Instance: ev.Instance, At: ev.At, Kind: api.EventLost, What: "lost",
		Details: map[string]string{"events": strconv.FormatUint(n, 10)},
	}
}

// since returns what is remembered after a point, and how many are forgotten. The
// caller holds mu.
func (l *eventLog) sinceLocked(after api.EventsAfter) (list []api.Event, forgotten uint64) {
	from := after.Seq
	if after.Instance != l.instance || from > l.last {
		from = 0
	}
	if oldest := l.last - uint64(len(l.ring)); from < oldest {
		from, forgotten = oldest, oldest-from
	}
	for seq := from + 1; seq <= l.last; seq++ {
		list = append(list, l.ring[(seq-1)%eventRing])
	}
	return list, forgotten
}

func (l *eventLog) figures() metrics.Events {
	l.mu.Lock()
	defer l.mu.Unlock()
	return metrics.Events{Total: l.last, Lost: l.lost, Followers: len(l.followers)}
}

// Events returns what the daemon remembers after a point.
func (e *Engine) Events(_ context.Context, after api.EventsAfter) api.EventList {
	l := &e.events
	l.mu.Lock()
	defer l.mu.Unlock()
	list, lost := l.sinceLocked(after)
	if list == nil {
		list = []api.Event{}
	}
	return api.EventList{Instance: l.instance, Lost: lost, Events: list}
}

// Follow sends what Events returns, and then every event as it happens, until ctx
// ends, the engine is closed or send returns an error, which it returns.
func (e *Engine) Follow(ctx context.Context, after api.EventsAfter, send func(api.Event) error) error {
	l := &e.events
	f := &follower{queue: make(chan api.Event, followerQueue)}
	l.mu.Lock()
	past, forgotten := l.sinceLocked(after)
	l.followers[f] = true
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.followers, f)
	}()
	if forgotten > 0 {
		past = append([]api.Event{lostEvent(past[0], forgotten)}, past...)
	}
	for _, ev := range past {
		if err := send(ev); err != nil {
			return err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-e.ctx.Done():
			return nil
		case ev := <-f.queue:
			if err := send(ev); err != nil {
				return err
			}
		}
	}
}

// audit tells one event in an endpoint's life, and who caused it, to the log and
// to those who follow the events.
func (e *Engine) audit(event string, ep endpoint.Endpoint, by endpoint.Process, more ...slog.Attr) {
	ev := api.Event{Kind: api.EventEndpoint, What: event, Endpoint: ep.Attachment.String(), Generation: ep.Generation, State: ep.State, Details: details(more)}
	attrs := append([]slog.Attr{
		slog.String("event", event), slog.String("endpoint", ep.Attachment.String()),
		slog.String("generation", ep.Generation.String()), slog.String("state", string(ep.State)),
	}, more...)
	if by.PID != 0 || by.Comm != "" {
		ev.Peer = &by
		attrs = append(attrs, slog.Int("peerPid", by.PID), slog.Int("peerUid", int(by.UID)), slog.String("peerComm", by.Comm))
	}
	e.events.add(ev)
	e.log.LogAttrs(e.ctx, slog.LevelInfo, "endpoint", attrs...)
}

// announce tells an event that concerns all endpoints.
func (e *Engine) announce(level slog.Level, event string, more ...slog.Attr) {
	e.events.add(api.Event{Kind: api.EventDaemon, What: event, Details: details(more)})
	e.log.LogAttrs(e.ctx, level, "node", append([]slog.Attr{slog.String("event", event)}, more...)...)
}

// changed tells of one kernel object of an endpoint. An ADD makes some thirty: the
// log has them at level debug.
func (e *Engine) changed(what string, ep endpoint.Endpoint, o object, more ...slog.Attr) {
	level := slog.LevelDebug
	if what == api.ObjectRepaired {
		level = slog.LevelInfo
	}
	e.events.add(api.Event{
		Kind: api.EventObject, What: what, Endpoint: ep.Attachment.String(), Generation: ep.Generation, State: ep.State,
		Object: &api.ChangedObject{Kind: o.Kind(), Name: o.Name(), Where: o.Where()}, Details: details(more),
	})
	e.log.LogAttrs(e.ctx, level, "object", append([]slog.Attr{
		slog.String("event", what), slog.String("generation", ep.Generation.String()), slog.String("object", o.Kind()+" "+o.Name()), slog.String("where", o.Where()),
	}, more...)...)
}

func details(attrs []slog.Attr) map[string]string {
	if len(attrs) == 0 {
		return nil
	}
	out := map[string]string{}
	for _, a := range attrs {
		out[a.Key] = fmt.Sprint(a.Value.Any())
	}
	return out
}
