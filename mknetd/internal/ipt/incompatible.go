package ipt

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// IncompatibleError is returned where iptables-nft does not read a table, because it
// holds a rule that nft(8) made and iptables cannot print. What else the table holds
// is then not known: nothing in it counts as missing or as removed.
type IncompatibleError struct {
	Table string
}

func (e *IncompatibleError) Error() string {
	return fmt.Sprintf("iptables cannot read table %[1]s: it holds a rule of nft that iptables does not know (look: nft list table ip %[1]s; move that rule into a table of its own)", e.Table)
}

// notSaved is what iptables-nft-save prints, with status 0, in place of a table (since
// 1.8.0, xtables-save.c). A table that only "contains incompatible base-chains" is
// printed but for those, which are foreign.
var notSaved = regexp.MustCompile("^# Table `([^']+)' is incompatible")

// Incompatible are the tables that iptables-save says it did not print.
func Incompatible(out string) []string {
	var tables []string
	for line := range linesOf(out) {
		if m := notSaved.FindStringSubmatch(line); m != nil {
			tables = append(tables, m[1])
		}
	}
	return tables
}

// whole returns an IncompatibleError where one of the tables that concern the caller
// is not in what iptables-save printed.
func whole(out string, concerns func(table string) bool) error {
	for _, table := range Incompatible(out) {
		if concerns(table) {
			return &IncompatibleError{table}
		}
	}
	return nil
}

// anyTable is for one who wants to know all of them.
func anyTable(string) bool { return true }

// refusedToRead reports whether iptables ended because it could not print a chain.
func refusedToRead(err error) bool {
	var c *CommandError
	return errors.As(err, &c) && strings.Contains(c.Stderr, "is incompatible, use 'nft' tool")
}

// concerns reports whether a table that cannot be read may hold something of ours. One
// that is not in use holds what a daemon with another guard left there: then it has
// chains of ours, see named.
func (f *Firewall) concerns(table string) bool {
	if slices.Contains(f.tables(), table) {
		return true
	}
	ours, err := nftHoldsChains(table, named)
	return err != nil || ours
}

// named reports whether a chain has a name of ours. Every rule of ours is in such a
// chain or leads to one.
func named(chain string) bool { return isShared(chain) || chainDigits(chain) != "" }

// A table that another program is changing can be incompatible for a moment.
const (
	readAttempts = 4
	readPause    = 150 * time.Millisecond
)

// untilCompatible repeats a read, a few times, while its error is an
// IncompatibleError.
func untilCompatible(ctx context.Context, read func() error) error {
	for attempt := 1; ; attempt++ {
		err := read()
		var incompatible *IncompatibleError
		if !errors.As(err, &incompatible) || attempt == readAttempts {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(readPause):
		}
	}
}
