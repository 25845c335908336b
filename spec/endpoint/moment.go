package endpoint

import "time"

// Moment is a moment on CLOCK_BOOTTIME, which no administrator and no NTP sets, and
// which runs on in suspend (clock_gettime(2)). Moments of two boots cannot be
// compared.
type Moment struct {
	BootID    string        `json:"bootID"`    // /proc/sys/kernel/random/boot_id
	SinceBoot time.Duration `json:"sinceBoot"` // nanoseconds
}

// MadeAfter reports whether the endpoint was made after a moment that a caller
// noted on both clocks. The clock that nobody sets decides where both are of one
// boot; the wall clock where one of them does not know.
func (e *Endpoint) MadeAfter(wall time.Time, m *Moment) bool {
	if m != nil && e.CreatedSinceBoot > 0 && m.BootID == e.Namespace.BootID {
		return e.CreatedSinceBoot > m.SinceBoot
	}
	return e.CreatedAt.After(wall)
}
