package api_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/client"
)

// following is an engine whose follower gets what the test sends.
func following(events <-chan specapi.Event, asked chan<- specapi.EventsAfter) *fake {
	return &fake{follow: func(ctx context.Context, after specapi.EventsAfter, send func(specapi.Event) error) error {
		asked <- after
		for {
			select {
			case <-ctx.Done():
				return nil
			case ev := <-events:
				if err := send(ev); err != nil {
					return err
				}
			}
		}
	}}
}

func TestFollow(t *testing.T) {
	events, asked := make(chan specapi.Event), make(chan specapi.EventsAfter, 8)
	s := serve(t, following(events, asked), func(c *api.Config) { c.Limits = api.Limits{Followers: 1} })
	c := s.client(t)
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	got := make(chan specapi.Event)
	ended := make(chan error, 1)
	enough := errors.New("enough")
	after := specapi.EventsAfter{Instance: "i", Seq: 7}
	go func() {
		ended <- c.Follow(ctx, after, func(ev specapi.Event) error {
			got <- ev
			if ev.Seq == 9 {
				return enough
			}
			return nil
		})
	}()
	if a := <-asked; a != after {
		t.Errorf("the engine was asked for %+v", a)
	}
	for seq := uint64(8); seq <= 9; seq++ {
		if seq == 9 {
			// Each event arrives while the stream goes on. Meanwhile there is no room for another.
			if err := c.Follow(ctx, specapi.EventsAfter{}, nil); specapi.CodeOf(err) != specapi.ResourceExhausted {
				t.Errorf("a second follower: %v", err)
			}
		}
		events <- specapi.Event{Instance: "i", Seq: seq, Kind: specapi.EventDaemon, What: "started"}
		if ev := <-got; ev.Seq != seq || ev.What != "started" {
			t.Errorf("got %+v", ev)
		}
	}
	if err := <-ended; !errors.Is(err, enough) {
		t.Errorf("follow: %v", err)
	}
}

func TestFollowEndsWithTheServer(t *testing.T) {
	events, asked := make(chan specapi.Event), make(chan specapi.EventsAfter, 1)
	s := serve(t, following(events, asked))
	ended := make(chan error, 1)
	go func() {
		ended <- s.client(t).Follow(context.Background(), specapi.EventsAfter{}, func(specapi.Event) error { return nil })
	}()
	<-asked
	s.stop()
	if err := <-ended; !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("got %v, want ErrUnreachable", err)
	}
}

func TestWhereToGoOn(t *testing.T) {
	s := serve(t, &fake{})
	for _, c := range []struct{ query, want string }{
		{"after=x&instance=i", "must be the number"}, {"after=3", "needs the instance"}, {"after=-1&instance=i", "must be the number"},
	} {
		for _, path := range []string{"/v1/events", "/v1/events/stream"} {
			if status, _, body := s.do(t, "GET", path+"?"+c.query, ""); status != 400 || !strings.Contains(string(body), c.want) {
				t.Errorf("%s?%s: %d %s", path, c.query, status, body)
			}
		}
	}
}
