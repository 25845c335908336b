package netns

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestInterruptedDumpIsRepeated(t *testing.T) {
	other := errors.New("other")
	for _, c := range []struct {
		name        string
		interrupted int
		then        error
		want        error
		calls       int
	}{
		{"never", 0, nil, nil, 1},
		{"twice", 2, nil, nil, 3},
		{"another error", 1, other, other, 2},
		{"always", dumpAttempts, nil, netlink.ErrDumpInterrupted, dumpAttempts},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			_, err := Dump(func() (int, error) {
				calls++
				if calls <= c.interrupted {
					return calls, fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
				}
				return calls, c.then
			})
			if !errors.Is(err, c.want) || calls != c.calls {
				t.Errorf("%d calls, %v; want %d, %v", calls, err, c.calls, c.want)
			}
		})
	}
}
