package ipt

import (
	"iter"
	"strings"
)

// linesOf yields what `iptables -S` or iptables-save printed, one rule at a time and
// trimmed. A rule can take more than one line: a newline in a comment is printed as it
// is, between the quotes.
func linesOf(text string) iter.Seq[string] {
	return func(yield func(string) bool) {
		var begun string
		for line := range strings.Lines(text) {
			if begun += line; unclosed(begun) {
				continue
			}
			if !yield(strings.TrimSpace(begun)) {
				return
			}
			begun = ""
		}
		if begun != "" { // cut off, which a reader may refuse
			yield(begun)
		}
	}
}

// unclosed reports whether text ends inside the quoted value of a long option. Nothing
// else is quoted: a quote in a chain's name is part of the name.
func unclosed(text string) bool {
	var (
		start         int  // of the word
		value, quoted bool // the word before it is an option; it is open
	)
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case quoted:
			quoted = c != '"'
		case c == ' ':
			value, start = strings.HasPrefix(text[start:i], "--"), i+1
		case c == '"' && i == start:
			quoted = value
		}
	}
	return quoted
}
