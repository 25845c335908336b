package netlab

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Exhaust lets this process open so many more descriptors and no further one, until
// the returned function is called. It needs no private host.
func Exhaust(t testing.TB, spare int) (restore func()) {
	t.Helper()
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	var held []*os.File
	for range spare + 1 { // the lowest free numbers, whatever lies above them
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, f)
	}
	now := was
	now.Cur = uint64(held[spare].Fd())
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &now); err != nil {
		t.Fatal(err)
	}
	for _, f := range held {
		f.Close()
	}
	return func() {
		t.Helper()
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Fatal(err)
		}
	}
}
