package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/nftrace"
)

// A chain is read when a packet meets a rule of it, and again when one is met that it
// did not have; not without end.
func TestRuleTexts(t *testing.T) {
	t.Parallel()
	have := map[string][]ipt.Handled{"filter MK-1": {{Handle: 4, Number: 1, Rule: "-j DROP"}}}
	var reads []string
	texts := newRuleTexts(func(_ context.Context, table, chain string) ([]ipt.Handled, error) {
		reads = append(reads, table+" "+chain)
		list, ok := have[table+" "+chain]
		if !ok {
			return nil, errors.New("no such chain")
		}
		return list, nil
	})
	ask := func(family, chain string, handle uint64) string {
		text, number := texts.of(t.Context(), nftrace.Step{Family: family, Table: "filter", Chain: chain, Handle: handle})
		return fmt.Sprint(number, " ", text)
	}
	want := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	want(ask("ip", "MK-1", 4), "1 -j DROP")
	want(ask("ip", "MK-1", 4), "1 -j DROP")
	want(ask("ip", "MK-1", 0), "0 ") // a policy
	want(ask("inet", "MK-1", 4), "0 ")
	have["filter MK-1"] = []ipt.Handled{{Handle: 5, Number: 1, Rule: "-j ACCEPT"}, {Handle: 4, Number: 2, Rule: "-j DROP"}}
	want(ask("ip", "MK-1", 5), "1 -j ACCEPT")
	want(ask("ip", "MK-1", 4), "2 -j DROP")
	want(ask("ip", "MK-1", 6), "0 ") // is gone already
	want(ask("ip", "MK-1", 6), "0 ")
	want(ask("ip", "other", 1), "0 ")
	want(ask("ip", "other", 1), "0 ")
	if got := strings.Join(reads, ","); got != "filter MK-1,filter MK-1,filter MK-1,filter other" {
		t.Errorf("read: %s", got)
	}
	for h := range uint64(2 * maxChainReads) {
		ask("ip", "MK-1", 100+h)
	}
	if len(reads) != maxChainReads {
		t.Errorf("%d reads, want %d", len(reads), maxChainReads)
	}
	want(ask("ip", "MK-1", 4), "2 -j DROP")
}
