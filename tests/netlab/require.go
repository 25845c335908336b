package netlab

import (
	"os"
	"testing"
)

// Missing skips a test that this machine cannot run and says what would mend that.
// With MKNET_REQUIRE set, to whatever, it fails instead: make test and CI set it, so
// that nothing is left out there unseen.
func Missing(t testing.TB, what error, fix string) {
	t.Helper()
	if os.Getenv("MKNET_REQUIRE") != "" {
		t.Fatalf("%v: %s", what, fix)
	}
	t.Skipf("%v: %s", what, fix)
}
