package session

import (
	"sync"
	"time"
)

// logLimit lets logBurst lines through at once and one a second after that.
type logLimit struct {
	mu         sync.Mutex
	tokens     float64
	last       time.Time
	suppressed int
}

const logBurst = 10

// allow reports whether a line may be written now and how many were not since
// the last one.
func (l *logLimit) allow(now time.Time) (suppressed int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last.IsZero() {
		l.tokens = logBurst
	} else {
		l.tokens = min(logBurst, l.tokens+now.Sub(l.last).Seconds())
	}
	l.last = now
	if l.tokens < 1 {
		l.suppressed++
		return 0, false
	}
	l.tokens--
	suppressed, l.suppressed = l.suppressed, 0
	return suppressed, true
}
