package carrier

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"mknet/shim/session"
	"mknet/spec/crash"
	"mknet/spec/pump"
)

var nextTokenKept = crash.New("shim.next-token-kept")

// nextSuffix names the file of the next token, beside that of the current one.
const nextSuffix = ".next"

// Tokens are the token of a sandbox and, while one is being replaced, the next:
// whether the agent has taken it is only known once it answers. Both are kept in
// files, so that a shim that dies in between can go on.
type Tokens struct {
	path    string
	current pump.Token
	next    *pump.Token
}

// LoadTokens reads the token file at path and the next token beside it, where
// there is one.
func LoadTokens(path string) (*Tokens, error) {
	current, err := session.LoadToken(path)
	if err != nil {
		return nil, err
	}
	t := &Tokens{path: path, current: current}
	next, err := session.LoadToken(path + nextSuffix)
	switch {
	case err == nil:
		t.next = &next
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	return t, nil
}

// candidates are the tokens that the agent may hold, the likelier first.
func (t *Tokens) candidates() []pump.Token {
	if t.next != nil {
		return []pump.Token{*t.next, t.current}
	}
	return []pump.Token{t.current}
}

// makeNext returns the next token, kept in its file.
func (t *Tokens) makeNext() (pump.Token, error) {
	if t.next == nil {
		next := session.NewToken()
		if err := session.ReplaceTokenFile(t.path+nextSuffix, next); err != nil {
			return pump.Token{}, err
		}
		nextTokenKept.Here()
		t.next = &next
	}
	return *t.next, nil
}

// isNext reports whether t is the next token.
func (t *Tokens) isNext(used pump.Token) bool { return t.next != nil && *t.next == used }

// commit makes the next token the current one: the agent holds it.
func (t *Tokens) commit() error {
	if t.next == nil {
		return nil
	}
	if err := os.Rename(t.path+nextSuffix, t.path); err != nil {
		return fmt.Errorf("token file: %w", err)
	}
	t.current, t.next = *t.next, nil
	return nil
}
