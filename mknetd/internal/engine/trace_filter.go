package engine

import (
	"context"
	"fmt"
	"time"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/nftrace"
	"mknet/spec/api"
)

const (
	// maxChainReads bounds how often a trace reads a chain, each about 10 ms: a packet
	// meets some ten, and one that has changed is read again.
	maxChainReads = 200
	// chainReadBudget bounds one reading.
	chainReadBudget = 10 * time.Second
)

// ruleTexts finds what is known of the rules that a trace names by their handles. A
// chain is read when a packet first meets a rule of it.
type ruleTexts struct {
	read   func(ctx context.Context, table, chain string) ([]ipt.Handled, error)
	chains map[[2]string]map[uint64]ipt.Handled
	reads  int
}

func newRuleTexts(read func(context.Context, string, string) ([]ipt.Handled, error)) *ruleTexts {
	return &ruleTexts{read: read, chains: map[[2]string]map[uint64]ipt.Handled{}}
}

// of is the text and place of a rule, nothing where they cannot be known: the rule is
// not of iptables, or gone.
func (r *ruleTexts) of(ctx context.Context, s nftrace.Step) (text string, number int) {
	if s.Handle == 0 || s.Family != "ip" {
		return "", 0
	}
	at := [2]string{s.Table, s.Chain}
	if h, ok := r.chains[at][s.Handle]; ok || r.reads >= maxChainReads {
		return h.Rule, h.Number
	}
	r.reads++
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), chainReadBudget)
	defer cancel()
	list, err := r.read(ctx, s.Table, s.Chain)
	if err == nil {
		r.chains[at] = map[uint64]ipt.Handled{}
		for _, h := range list {
			r.chains[at][h.Handle] = h
		}
	}
	h := r.chains[at][s.Handle]
	if r.chains[at] == nil {
		r.chains[at] = map[uint64]ipt.Handled{}
	}
	r.chains[at][s.Handle] = h // also that it is not known
	return h.Rule, h.Number
}

// traceFilter begins to follow the flow through iptables; why says why it does not.
func (e *Engine) traceFilter(f nftrace.Filter) (t *nftrace.Trace, why string) {
	if e.firewall.Flavour() != ipt.NFT {
		return nil, "iptables is of the flavour legacy, which tells of no single packet"
	}
	t, err := nftrace.Open(f)
	if err != nil {
		return nil, err.Error()
	}
	return t, ""
}

// steps is where what iptables does comes from, nil where nothing does.
func (t *trace) steps() <-chan nftrace.Step {
	if t.filter == nil || t.deaf {
		return nil
	}
	return t.filter.Steps()
}

// step sends what iptables did. more is false where the kernel will tell nothing more.
func (t *trace) step(ctx context.Context, s nftrace.Step, more bool, send func(api.TraceLine) error) error {
	if !more {
		t.deaf = true
		return send(t.note("iptables", "the kernel's messages can be read no more: what follows is not told"))
	}
	text, number := t.texts.of(ctx, s)
	ev := t.teller.Filter(s, text, number)
	return send(api.TraceLine{Event: &ev})
}

// filtered says what of the flow was not told, and how many steps of that are lost.
func (t *trace) filtered() (notes []remark, lost uint64) {
	if t.filter == nil {
		return nil, 0
	}
	left, err := t.filter.LeftOut()
	switch {
	case err != nil:
		t.e.log.Error("read how many packets a trace has left out", "err", err)
	case left > 0:
		notes = append(notes, remark{"iptables", fmt.Sprintf("%d packets of the flow were not followed: at most %d a second are in each direction, and %d at once", left, nftrace.MarkRate, nftrace.MarkBurst)})
	}
	return notes, t.filter.Lost()
}

// startNotes are said first.
func (t *trace) startNotes() []remark {
	if t.filter != nil {
		return nil
	}
	text := "not followed: " + t.unfiltered
	if len(t.children) > 0 {
		text += "; shown is what the rules of the child's chains count meanwhile, of all its flows"
	}
	return []remark{{"iptables", text}}
}
