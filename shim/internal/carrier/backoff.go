package carrier

import (
	"context"
	"math/rand/v2"
	"time"
)

// Times of reconnecting. Together they let a link carry packets again within a
// second of the peer's return.
const (
	firstDelay  = 20 * time.Millisecond
	maxDelay    = 400 * time.Millisecond
	dialTimeout = time.Second // of one attempt to connect, not of the handshake
)

// backoff spaces attempts out, with jitter so that the shims of one host do not
// come in step. The zero value begins with the first delay.
type backoff struct{ next time.Duration }

func (b *backoff) reset() { b.next = 0 }

// delay is how long to wait now: from half of the step to the whole step.
func (b *backoff) delay() time.Duration {
	step := max(b.next, firstDelay)
	b.next = min(2*step, maxDelay)
	return step/2 + rand.N(step/2+1)
}

// wait waits for the next attempt; false when ctx ended.
func (b *backoff) wait(ctx context.Context) bool {
	t := time.NewTimer(b.delay())
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
