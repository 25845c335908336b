package session

import (
	"context"
	"errors"
	"testing"

	"mknet/spec/pump"
)

// narrow grants a window that the data plane refuses.
type narrow struct{ *recorder }

var tooSmall = pump.Window{Bytes: pump.MinWindowBytes - 1, Messages: pump.MinWindowMessages}

func (n narrow) Configure(ctx context.Context, cfg pump.LinkConfig) (pump.Ack, error) {
	ack, err := n.recorder.Configure(ctx, cfg)
	ack.Windows = []pump.Window{tooSmall}
	return ack, err
}

// A window that the data plane would refuse ends the handshake, whoever grants
// it: no session begins that cannot run.
func TestWindowsAreCheckedInTheHandshake(t *testing.T) {
	t.Run("of the shim", func(t *testing.T) {
		l, dial := unixListener(t)
		a := startAgent(t, l, nil)
		offer := testOffer()
		offer.Windows = []pump.Window{pump.BulkWindow, tooSmall}
		if _, err := testClient(t, dial).Open(t.Context(), offer); !errors.Is(err, pump.ErrMalformedConfig) {
			t.Errorf("got %v, want ErrMalformedConfig", err)
		}
		a.stop(t)
		if n, _ := a.seen(); n != 0 {
			t.Errorf("the agent was configured %d times", n)
		}
	})
	t.Run("of the agent", func(t *testing.T) {
		l, dial := unixListener(t)
		a := startAgent(t, l, func(s *Server, r *recorder) { s.Handler = narrow{r} })
		if s, err := testClient(t, dial).Open(t.Context(), testOffer()); err == nil {
			t.Errorf("a session began with the windows %+v", s.Ack.Windows)
		}
		a.stop(t)
		if len(a.running) != 0 {
			t.Error("the agent began a session")
		}
	})
}
