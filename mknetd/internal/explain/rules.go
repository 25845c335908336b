package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"mknet/mknetd/internal/ipt"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// packet is what rules look at.
type packet struct {
	in, out           string
	inGroup, outGroup uint32
	src, dst          netip.Addr
	protocol          string
	sport, dport      int // 0: not known, or none
	icmpType          int
	tracking
	origDst     netip.Addr
	origDport   int
	replySrc    netip.Addr
	reversePath bool // the source is reached by the interface that it came in by
	flows       int  // that the source has begun
	mark        uint32
}

// answer of a match: yes, no, or why it cannot be told.
type answer struct {
	yes   bool
	maybe string
}

// decision is what a chain came to.
type decision struct {
	target string // ACCEPT, DROP, REJECT, MASQUERADE, ...; empty: fell out of the chain
	rule   string // "FORWARD 3: -j ACCEPT"; or the policy
	maybe  string // a rule before it that cannot be judged
	asked  []api.Rule
}

// evaluator runs one packet through one table.
type evaluator struct {
	table ipt.Saved
	p     *packet
	d     decision
	depth int
}

// maxDepth bounds jumps: the kernel refuses loops, a torn dump may have one.
const maxDepth = 64

// run asks a built-in chain; false where the table does not have it.
func run(table ipt.Saved, chain string, p *packet) (decision, bool) {
	c, there := table.Chains[chain]
	if !there {
		return decision{}, false
	}
	e := evaluator{table: table, p: p}
	if !e.chain(chain) || e.d.target == "" {
		if c.Policy != "" {
			e.d.target, e.d.rule = c.Policy, chain+": the policy "+c.Policy
		}
	}
	return e.d, true
}

// chain reports whether the packet's fate was decided in it.
func (e *evaluator) chain(name string) bool {
	if e.depth++; e.depth > maxDepth {
		return false
	}
	defer func() { e.depth-- }()
	for i, words := range e.table.Chains[name].Rules {
		a := e.p.match(words)
		text := strings.Join(withoutComment(words), " ")
		if ofEndpoint(name) {
			e.d.asked = append(e.d.asked, api.Rule{Chain: name, Number: i + 1, Text: text, Matches: a.word()})
		}
		if a.maybe != "" && e.d.maybe == "" {
			e.d.maybe = fmt.Sprintf("%s %d: %s: %s", name, i+1, text, a.maybe)
		}
		if !a.yes {
			continue
		}
		target, jump := value(words, "-j"), true
		if target == "" {
			target, jump = value(words, "-g"), false
		}
		switch {
		case target == "RETURN":
			return false
		case target == "" || target == "LOG" || target == "NFLOG" || target == "TRACE" || target == "CONNMARK" || target == "CT" || target == "NOTRACK" || target == "TCPMSS":
		case target == "MARK":
			e.p.setMark(value(words, "--set-xmark"))
		case e.known(target):
			if e.chain(target) {
				return true
			}
			if !jump {
				return false // a goto does not come back
			}
		default:
			e.d.target, e.d.rule = target, fmt.Sprintf("%s %d: %s", name, i+1, text)
			return true
		}
	}
	return false
}

func (e *evaluator) known(chain string) bool { _, there := e.table.Chains[chain]; return there }

// ofEndpoint reports whether a chain's rules are worth showing one by one.
func ofEndpoint(chain string) bool {
	return strings.HasPrefix(chain, endpoint.ChainPrefix) || strings.HasPrefix(chain, "MKNET-POD")
}

func (a answer) word() string {
	switch {
	case a.maybe != "":
		return a.maybe
	case a.yes:
		return "yes"
	}
	return "no"
}

func value(words []string, option string) string {
	if i := slices.Index(words, option); i >= 0 && i+1 < len(words) {
		return words[i+1]
	}
	return ""
}

func withoutComment(words []string) []string {
	out := slices.Clone(words)
	if i := slices.Index(out, "--comment"); i >= 0 && i+1 < len(out) {
		out = slices.Delete(out, i, i+2)
		if i >= 2 && out[i-1] == "comment" {
			out = slices.Delete(out, i-2, i)
		}
	}
	return out
}

// match asks every option of a rule. One that surely does not match decides,
// whatever the others are.
func (p *packet) match(words []string) answer {
	all := answer{yes: true}
	for i := 0; i < len(words); i++ {
		not := words[i] == "!"
		if not {
			i++
		}
		if i >= len(words) {
			break
		}
		option := words[i]
		if option == "-j" || option == "-g" {
			break // what follows is the target's
		}
		arg := ""
		for n := 0; i+1 < len(words) && words[i+1] != "!" && !strings.HasPrefix(words[i+1], "-"); n++ {
			if i++; n == 0 {
				arg = words[i] // a set has two words; who asks for one is not judged anyway
			}
		}
		a := p.option(option, arg)
		if a.maybe != "" {
			all.maybe = a.maybe
			continue
		}
		if a.yes == not {
			return answer{}
		}
	}
	if all.maybe != "" {
		all.yes = false
	}
	return all
}

func (p *packet) option(option, arg string) answer {
	is := func(b bool) answer { return answer{yes: b} }
	switch option {
	case "-m", "--comment", "--connlimit-mask", "--connlimit-saddr":
		return is(true)
	case "-s":
		return is(inPrefix(p.src, arg))
	case "-d":
		return is(inPrefix(p.dst, arg))
	case "-i":
		return is(link(p.in, arg))
	case "-o":
		return is(link(p.out, arg))
	case "-p":
		return is(p.protocolIs(arg))
	case "--dport":
		return is(port(p.dport, arg))
	case "--sport":
		if p.sport == 0 {
			return answer{maybe: "the source port is not known"}
		}
		return is(port(p.sport, arg))
	case "--icmp-type":
		n, err := strconv.Atoi(arg)
		if err != nil {
			return answer{maybe: "icmp type " + arg + " is not known here"}
		}
		return is(n == p.icmpType)
	case "--ctstate":
		return is(p.stateIs(arg))
	case "--ctdir":
		return is((arg == "REPLY") == p.reply)
	case "--ctorigdst":
		return is(inPrefix(p.origDst, arg))
	case "--ctorigdstport":
		return is(port(p.origDport, arg))
	case "--ctreplsrc":
		return is(inPrefix(p.replySrc, arg))
	case "--src-group":
		return is(masked(p.inGroup, arg))
	case "--dst-group":
		return is(masked(p.outGroup, arg))
	case "--mark":
		return is(masked(p.mark, arg))
	case "--invert": // of rpfilter
		return is(!p.reversePath)
	case "--connlimit-above":
		n, err := strconv.Atoi(arg)
		return is(err == nil && p.flows > n)
	case "--syn":
		return is(p.protocol == "tcp" && p.begins)
	}
	return answer{maybe: "match " + option + " cannot be judged here"}
}

// stateIs: DNAT, RELATED and INVALID are never of these packets.
func (p *packet) stateIs(list string) bool { return slices.Contains(strings.Split(list, ","), p.state) }

func (p *packet) protocolIs(arg string) bool {
	numbers := map[string]string{"icmp": "1", "tcp": "6", "udp": "17"}
	return arg == "all" || arg == "0" || arg == p.protocol || arg == numbers[p.protocol]
}

func (p *packet) setMark(arg string) {
	text, maskText, has := strings.Cut(arg, "/")
	v, err := strconv.ParseUint(text, 0, 32)
	m := uint64(0xffffffff)
	if has && err == nil {
		m, err = strconv.ParseUint(maskText, 0, 32)
	}
	if err == nil {
		p.mark = p.mark&^uint32(m) ^ uint32(v)
	}
}

func inPrefix(a netip.Addr, arg string) bool {
	if !a.IsValid() {
		return false
	}
	if prefix, err := netip.ParsePrefix(arg); err == nil {
		return prefix.Contains(a)
	}
	one, err := netip.ParseAddr(arg)
	return err == nil && one == a
}

// link compares a name; a "+" at the end stands for anything.
func link(name, arg string) bool {
	if prefix, wild := strings.CutSuffix(arg, "+"); wild {
		return name != "" && strings.HasPrefix(name, prefix)
	}
	return name == arg
}

func port(n int, arg string) bool {
	from, to, isRange := strings.Cut(arg, ":")
	low, err := strconv.Atoi(from)
	high := low
	if isRange {
		high, _ = strconv.Atoi(to)
	}
	return err == nil && n >= low && n <= high
}

// masked compares a number with "value/mask".
func masked(n uint32, arg string) bool {
	text, maskText, has := strings.Cut(arg, "/")
	v, err := strconv.ParseUint(text, 0, 32)
	m := uint64(0xffffffff)
	if has && err == nil {
		m, err = strconv.ParseUint(maskText, 0, 32)
	}
	return err == nil && n&uint32(m) == uint32(v)
}
