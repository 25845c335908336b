package pump

import (
	"math/rand/v2"
	"time"
)

// looks is how many silent looks in a row make a dead peer. Looks are counted,
// not time, so that a machine that was paused does not take its peer for dead.
const looks = 5

// keepalive asks the peer on every lane for a sign of life and ends the session
// when there is none.
func (s *session) keepalive() {
	every := s.cfg.DeadAfter / looks
	tick := time.NewTicker(every)
	defer tick.Stop()
	silent := make([]int, len(s.lanes))
	for {
		for i, l := range s.lanes {
			if l.alive.Swap(false) {
				silent[i] = 0
			}
			if silent[i] > looks-1 {
				s.fail(&DeadPeerError{Lane: i, Silence: time.Duration(silent[i]) * every})
				return
			}
			silent[i]++
			l.ping()
		}
		select {
		case <-tick.C:
		case <-s.done:
			return
		}
	}
}

// ping asks for a sign of life and starts the clock, unless it runs already.
func (l *lane) ping() {
	r := &l.rtt
	r.Lock()
	if !r.waiting {
		r.token, r.sent, r.waiting = rand.Uint64(), time.Now(), true
	}
	token := r.token
	r.Unlock()
	l.postPing(token)
}

// pong stops the clock. What answers no ping of ours is ignored.
func (l *lane) pong(token uint64) {
	r := &l.rtt
	r.Lock()
	defer r.Unlock()
	if !r.waiting || token != r.token {
		return
	}
	r.waiting = false
	if l == l.s.latency() {
		l.s.cfg.Counters.rtt.Store(int64(max(time.Since(r.sent), 1)))
	}
}
