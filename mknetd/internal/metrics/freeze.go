package metrics

import (
	"bytes"
	"context"
	"net/http"

	"mknet/spec/api"
)

// frozen is what a daemon said last.
type frozen struct {
	state   api.Health
	metrics recorded
}

// Freeze has the listener repeat what it would answer now: the source is about to
// end, and nobody else answers yet. Nobody asks the source once it has returned.
func (s *Set) Freeze(ctx context.Context) {
	f := &frozen{state: s.source.Health(ctx), metrics: recorded{header: http.Header{}, code: http.StatusOK}}
	s.Handler().ServeHTTP(&f.metrics, (&http.Request{Method: http.MethodGet}).WithContext(ctx))
	s.asking.Lock() // waits for answers at work
	defer s.asking.Unlock()
	s.frozen = f
}

// live calls f, unless there is an answer that is to be repeated, which is returned.
func (s *Set) live(f func()) *frozen {
	s.asking.RLock()
	defer s.asking.RUnlock()
	if s.frozen == nil {
		f()
	}
	return s.frozen
}

// recorded is an answer to be given again.
type recorded struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (r *recorded) Header() http.Header         { return r.header }
func (r *recorded) WriteHeader(code int)        { r.code = code }
func (r *recorded) Write(b []byte) (int, error) { return r.body.Write(b) }

func (r *recorded) answer(w http.ResponseWriter) {
	for name, values := range r.header {
		w.Header()[name] = values
	}
	w.WriteHeader(r.code)
	_, _ = w.Write(r.body.Bytes()) // the caller has gone: there is nobody to tell
}
