package datapath

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// dumpAttempts bounds how often a dump is repeated that the kernel reports as
// inconsistent because something changed meanwhile (NLM_F_DUMP_INTR): links come
// and go on a node at any time.
const dumpAttempts = 20

// dump repeats an interrupted dump.
func dump[T any](f func() (T, error)) (T, error) {
	for attempt := 1; ; attempt++ {
		v, err := f()
		if attempt == dumpAttempts || !errors.Is(err, netlink.ErrDumpInterrupted) {
			return v, err
		}
	}
}
