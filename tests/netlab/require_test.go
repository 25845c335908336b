package netlab_test

import (
	"errors"
	"strings"
	"testing"

	"mknet/tests/netlab"
)

// ended is a test that notes how it ended and stops there.
type ended struct {
	testing.TB
	how, said string
}

func (e *ended) Helper() {}

func (e *ended) Fatalf(format string, args ...any) { e.end("failed", format, args) }

func (e *ended) Skipf(format string, args ...any) { e.end("skipped", format, args) }

func (e *ended) end(how, _ string, args []any) {
	e.how = how
	for _, a := range args {
		if err, ok := a.(error); ok {
			e.said += err.Error() + " "
		} else {
			e.said += a.(string)
		}
	}
	panic(e)
}

func TestMissingIsAFailureWhereItIsRequired(t *testing.T) {
	for require, want := range map[string]string{"": "skipped", "bpf": "failed", "anything": "failed"} {
		t.Setenv("MKNET_REQUIRE", require)
		e := &ended{TB: t}
		func() {
			defer func() {
				if r := recover(); r != e {
					t.Errorf("MKNET_REQUIRE=%q: %v", require, r)
				}
			}()
			netlab.Missing(e, errors.New("no tool"), "apt-get install tool")
		}()
		if e.how != want || !strings.Contains(e.said, "no tool") || !strings.Contains(e.said, "apt-get install tool") {
			t.Errorf("MKNET_REQUIRE=%q: %s with %q, want it %s", require, e.how, e.said, want)
		}
	}
}
