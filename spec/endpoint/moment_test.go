package endpoint

import (
	"testing"
	"time"
)

// Whatever the wall clock did meanwhile, what was made before a DEL goes and what
// was made after it stays.
func TestMadeAfterAClockThatJumps(t *testing.T) {
	wall, day := time.Unix(1e9, 0), 24*time.Hour
	made := func(jumped time.Duration, sinceBoot time.Duration) *Endpoint {
		return &Endpoint{Namespace: Namespace{BootID: "b"}, CreatedAt: wall.Add(jumped), CreatedSinceBoot: sinceBoot}
	}
	at := &Moment{BootID: "b", SinceBoot: time.Hour}
	for _, c := range []struct {
		name string
		ep   *Endpoint
		at   *Moment
		want bool
	}{
		{"before, same clock", made(-time.Minute, time.Hour-time.Minute), at, false},
		{"after, same clock", made(time.Minute, time.Hour+time.Minute), at, true},
		{"before, the clock went back a day since", made(day, time.Hour-time.Minute), at, false},
		{"after, the clock went back a day since", made(-day, time.Hour+time.Minute), at, true},
		{"before, the clock went on a day since", made(-day, time.Hour-time.Minute), at, false},
		{"after, the clock went on a day since", made(day, time.Hour+time.Minute), at, true},
		{"the record knows no boot time", made(time.Minute, 0), at, true},
		{"the caller knows no boot time", made(-time.Minute, time.Hour+time.Minute), nil, false},
		{"another boot", made(time.Minute, time.Minute), &Moment{BootID: "c", SinceBoot: time.Hour}, true},
	} {
		if got := c.ep.MadeAfter(wall, c.at); got != c.want {
			t.Errorf("%s: got %t, want %t", c.name, got, c.want)
		}
	}
}
