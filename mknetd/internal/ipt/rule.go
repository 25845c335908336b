package ipt

import (
	"fmt"
	"slices"
	"strings"
)

// rule is one rule as words, without "-A chain". Ours are written in the order
// and form in which iptables prints them; foreign ones are kept as printed.
type rule []string

// chain is a chain that belongs to one endpoint as a whole.
type chain struct {
	name  string
	rules []rule
}

// placed is a rule in a chain that others use too.
type placed struct {
	chain string
	rule  rule
}

// words builds a rule from text that needs no quoting.
func words(format string, args ...any) rule {
	return strings.Fields(fmt.Sprintf(format, args...))
}

// marked adds the comment that makes a rule ours, before its target.
func (r rule) marked(comment string) rule {
	at := len(r)
	if i := slices.IndexFunc(r, func(w string) bool { return w == "-j" || w == "-g" }); i >= 0 {
		at = i
	}
	return slices.Insert(slices.Clone(r), at, "-m", "comment", "--comment", comment)
}

// comment is the text of the rule's comment, "" when it has none.
func (r rule) comment() string { return r.value("--comment") }

// target is the chain or target that the rule ends in.
func (r rule) target() string {
	if t := r.value("-j"); t != "" {
		return t
	}
	return r.value("-g")
}

func (r rule) value(option string) string {
	if i := slices.Index(r, option); i >= 0 && i+1 < len(r) {
		return r[i+1]
	}
	return ""
}

// String is the rule as iptables-restore reads it.
func (r rule) String() string {
	quoted := make([]string, len(r))
	for i, w := range r {
		quoted[i] = quote(w)
	}
	return strings.Join(quoted, " ")
}

func (p placed) String() string { return "-A " + p.chain + " " + p.rule.String() }

// quote follows the reader of iptables-restore (xshared.c, add_param_to_argv):
// only double quotes group words, and a backslash escapes inside them.
func quote(word string) string {
	if word != "" && !strings.ContainsAny(word, " \t\r\n\"\\'") {
		return word
	}
	return `"` + escapes.Replace(word) + `"`
}

var escapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// split is the inverse of quote for a whole line.
func split(line string) []string {
	var (
		out             []string
		word            strings.Builder
		inWord, inQuote bool
	)
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case inQuote && c == '\\' && i+1 < len(line):
			i++
			word.WriteByte(line[i])
		case c == '"':
			inQuote, inWord = !inQuote, true
		case !inQuote && (c == ' ' || c == '\t'):
			if inWord {
				out = append(out, word.String())
				word.Reset()
				inWord = false
			}
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if inWord {
		out = append(out, word.String())
	}
	return out
}

// implied are the matches whose every use has an option of its own, so that
// "-m name" adds nothing. Versions of iptables differ in where they print it.
var implied = []string{"comment", "conntrack", "connlimit", "tcp", "udp", "icmp"}

// key is the rule's normal form: two rules that mean the same to the kernel have
// the same key, whichever version and flavour printed them. The order of matches
// is not significant, nor is that of the states in a list.
func (r rule) key() string {
	var clauses []string
	for i := 0; i < len(r); {
		start := i
		if r[i] == "!" && i+1 < len(r) {
			i++
		}
		i++
		for i < len(r) && r[i] != "!" && !strings.HasPrefix(r[i], "-") {
			i++
		}
		clause := slices.Clone(r[start:i])
		if clause[0] == "-m" && len(clause) == 2 && slices.Contains(implied, clause[1]) {
			continue
		}
		if clause[0] == "-c" { // counters, as -S -v prints them
			continue
		}
		last := len(clause) - 1
		switch clause[max(0, last-1)] {
		case "-s", "-d":
			clause[last] = strings.TrimSuffix(clause[last], "/32")
		case "--ctstate":
			states := strings.Split(clause[last], ",")
			slices.Sort(states)
			clause[last] = strings.Join(states, ",")
		}
		clauses = append(clauses, clause.String())
	}
	slices.Sort(clauses)
	return strings.Join(clauses, " ")
}
