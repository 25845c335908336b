package topo

import (
	"strings"

	"mknet/spec/endpoint"
)

// mark is what the alias of a link of ours says.
type mark struct {
	generation endpoint.Generation
	// restoreForward is on a veth peer when its attachment was the one that
	// switched ip_forward on: whoever is the last to leave switches it off.
	restoreForward bool
}

const restoreForward = " ip_forward=0"

func (m mark) String() string {
	s := m.generation.Alias()
	if m.restoreForward {
		s += restoreForward
	}
	return s
}

// parseMark reads an alias; ok is false for a foreign one.
func parseMark(alias string) (m mark, ok bool) {
	digits, ours := strings.CutPrefix(alias, endpoint.AliasPrefix)
	if !ours {
		return mark{}, false
	}
	digits, m.restoreForward = strings.CutSuffix(digits, restoreForward)
	g, err := endpoint.ParseGeneration(digits)
	m.generation = g
	return m, err == nil
}
