package ipt

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
)

// A pod whose shared rules could not be made is refused, and so is every other one
// of its subnet until they are.
func TestServePodsAfterAFailure(t *testing.T) {
	prime(t)
	netlab.Clean(t)
	l := newLab(t, Legacy)
	hasty := open(t, Legacy, func(c *Config) { c.Wait = time.Second })
	t.Cleanup(func() { share(t, Legacy) })
	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	hold := func(how int) {
		t.Helper()
		if err := unix.Flock(int(lock.Fd()), how); err != nil {
			t.Fatal(err)
		}
	}
	translated, rules := netip.MustParsePrefix("10.88.0.0/16"), "-A POSTROUTING -s 10.88.0.0/16 "
	subnets := []netip.Prefix{translated, {}}

	hold(unix.LOCK_EX)
	var wg sync.WaitGroup
	refused := make([]error, 6)
	for i := range refused {
		wg.Go(func() { refused[i] = hasty.ServePods(ctx(t), subnets[i%2]) })
	}
	wg.Wait()
	for i, err := range refused {
		if !errors.Is(err, ErrBusy) {
			t.Errorf("call %d under a held lock, subnet %v: got %v, want ErrBusy", i, subnets[i%2], err)
		}
	}

	hold(unix.LOCK_UN)
	if got := l.ipt("-t", "nat", "-S", "POSTROUTING"); strings.Contains(got, rules) {
		t.Fatalf("the fault made no difference: %s", got)
	}
	if err := hasty.ServePods(ctx(t), translated); err != nil {
		t.Fatal(err)
	}
	if faults, err := hasty.CheckShared(ctx(t)); err != nil || faults != nil {
		t.Errorf("after the next pod: %v, %v", faults, err)
	}
	if got := l.ipt("-t", "nat", "-S", "POSTROUTING"); !strings.Contains(got, rules) {
		t.Errorf("got %s, want %s", got, rules)
	}

	// Served pods ask iptables nothing, so that nobody's lock matters to them.
	hold(unix.LOCK_EX)
	defer hold(unix.LOCK_UN)
	for _, subnet := range subnets {
		if err := hasty.ServePods(ctx(t), subnet); err != nil {
			t.Errorf("a further pod, subnet %v: %v", subnet, err)
		}
	}
	if err := hasty.ServePods(ctx(t), netip.MustParsePrefix("10.89.0.0/16")); !errors.Is(err, ErrBusy) {
		t.Errorf("another subnet under a held lock: got %v, want ErrBusy", err)
	}
}
