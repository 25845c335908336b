package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"mknet/spec/api"
)

func named(i int) api.Event { return api.Event{Kind: api.EventDaemon, What: fmt.Sprint(i)} }

// line is a list of events in short: what each says, and how many were lost.
func line(list []api.Event) string {
	var words []string
	for _, ev := range list {
		if ev.Kind == api.EventLost {
			words = append(words, "lost:"+ev.Details["events"])
			continue
		}
		words = append(words, ev.What)
	}
	return strings.Join(words, " ")
}

func TestEventsAreRememberedAndNumbered(t *testing.T) {
	e := &Engine{events: newEventLog()}
	for i := 1; i <= 5; i++ {
		e.events.add(named(i))
	}
	for _, c := range []struct {
		name  string
		after api.EventsAfter
		want  string
	}{
		{"all", api.EventsAfter{}, "1 2 3 4 5"},
		{"the rest", api.EventsAfter{Instance: e.events.instance, Seq: 3}, "4 5"},
		{"nothing new", api.EventsAfter{Instance: e.events.instance, Seq: 5}, ""},
		{"another daemon's", api.EventsAfter{Instance: "other", Seq: 3}, "1 2 3 4 5"},
		{"a number that never was", api.EventsAfter{Instance: e.events.instance, Seq: 99}, "1 2 3 4 5"},
	} {
		got := e.Events(t.Context(), c.after)
		if line(got.Events) != c.want || got.Lost != 0 || got.Instance != e.events.instance {
			t.Errorf("%s: got %q, lost %d, want %q", c.name, line(got.Events), got.Lost, c.want)
		}
	}
}

func TestOldEventsAreForgottenAndCounted(t *testing.T) {
	e := &Engine{events: newEventLog()}
	const all = eventRing + 10
	for i := 1; i <= all; i++ {
		e.events.add(named(i))
	}
	got := e.Events(t.Context(), api.EventsAfter{Instance: e.events.instance, Seq: 4})
	if got.Lost != 6 || len(got.Events) != eventRing {
		t.Errorf("lost %d, has %d", got.Lost, len(got.Events))
	}
	for i, ev := range got.Events {
		if want := uint64(11 + i); ev.Seq != want || ev.What != fmt.Sprint(want) {
			t.Fatalf("place %d: event %d says %s", i, ev.Seq, ev.What)
		}
	}
}

// A follower that does not keep up misses events, is told how many, and nobody
// waits for it.
func TestASlowFollowerIsToldWhatItMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		e := &Engine{events: newEventLog(), ctx: ctx}
		e.events.add(named(1))
		slow := make(chan struct{})
		var got []api.Event
		ended := make(chan error, 1)
		go func() {
			ended <- e.Follow(ctx, api.EventsAfter{}, func(ev api.Event) error {
				<-slow
				got = append(got, ev)
				return nil
			})
		}()
		synctest.Wait() // it has event 1 and does not come back
		for i := 2; i <= followerQueue+8; i++ {
			e.events.add(named(i))
		}
		close(slow)
		synctest.Wait()
		e.events.add(named(9999))
		synctest.Wait()
		if f := e.events.figures(); f.Lost != 7 || f.Followers != 1 || f.Total != followerQueue+9 {
			t.Errorf("figures %+v", f)
		}
		want := []string{fmt.Sprint(followerQueue + 1), "lost:7", "9999"}
		if tail := line(got[len(got)-3:]); tail != strings.Join(want, " ") || len(got) != followerQueue+3 {
			t.Errorf("got %d events, the last are %q, want %q", len(got), tail, want)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if f := e.events.figures(); f.Followers != 0 {
			t.Errorf("%d followers are left", f.Followers)
		}
	})
}

func TestFollowReturnsWhatSendReturns(t *testing.T) {
	e := &Engine{events: newEventLog(), ctx: t.Context()}
	e.events.add(named(1))
	gone := errors.New("hung up")
	if err := e.Follow(t.Context(), api.EventsAfter{}, func(api.Event) error { return gone }); !errors.Is(err, gone) {
		t.Errorf("got %v", err)
	}
}
