package engine

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/rulebook"
	"mknet/spec/policy"
)

// fullKeeper has no space left for documents until err is taken away.
type fullKeeper struct{ err error }

func (k *fullKeeper) Each(func(string, []byte) error) error    { return nil }
func (k *fullKeeper) Update(map[string][]byte, []string) error { return k.err }

// Documents of the folder that could not be stored are in health while that lasts
// and in the log once, and come in force by a later try.
func TestPolicyFolderIsTriedAgain(t *testing.T) {
	t.Parallel()
	keeper := &fullKeeper{fmt.Errorf("write the store: %w", unix.ENOSPC)}
	rules, err := rulebook.Open(keeper, policy.Pools{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	group := "apiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: web}\nspec: {}\n"
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(group), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	e := &Engine{cfg: Config{PolicyDir: dir}, log: slog.New(slog.NewTextHandler(&log, nil)), rules: rules, ctx: t.Context()}
	for _, c := range []struct {
		name   string
		cause  error
		again  bool
		logged int // lines about the folder, by now
	}{
		{"at the start", keeper.err, false, 1},
		{"tried again", keeper.err, true, 1},
		{"another cause", fmt.Errorf("write the store: %w", unix.EIO), true, 2},
		{"after a change of a file", fmt.Errorf("write the store: %w", unix.EIO), false, 3},
		{"over", nil, true, 3},
	} {
		keeper.err = c.cause
		if err := e.readPolicyDir(c.again); !errors.Is(err, c.cause) || c.cause == nil && err != nil {
			t.Errorf("%s: got %v, want %v", c.name, err, c.cause)
		}
		trouble, want := strings.Join(e.policyTrouble(), "\n"), "policy folder: "
		if got := strings.Contains(trouble, want); got != (c.cause != nil) {
			t.Errorf("%s: health says %q; want %q in it: %t", c.name, trouble, want, c.cause != nil)
		}
		if got := strings.Count(log.String(), "policy folder is not taken"); got != c.logged {
			t.Errorf("%s: logged %d times, want %d:\n%s", c.name, got, c.logged, &log)
		}
	}
	if got := len(rules.Entries()); got != 1 {
		t.Errorf("%d documents are in force, want 1", got)
	}
}
