package policy

import "fmt"

// Limits of one direction of one policy, and of an endpoint. A rule counts once,
// however many peers and ports it lists.
const (
	MaxRules         = 1024
	MaxAddressBounds = 4096 // distinct beginnings and ends of CIDRs; n distinct CIDRs never make more than 2n + 1
	MaxAddressSets   = 2048 // different sets of rules that match an address; n distinct CIDRs: at most n + 1
	MaxPortBounds    = 4096 // likewise over protocol and port range
	MaxPortSets      = 2048 // n distinct pairs of protocol and port range never make more than 2n + 1
	MaxReferences    = 256  // distinct SecurityGroups that the rules name

	// MaxGroupsPerEndpoint is how many SecurityGroups one endpoint may hold.
	MaxGroupsPerEndpoint = 16
)

// Size is what one direction needs. It decides whether a document is accepted and
// which class of table holds it.
type Size struct {
	Rules         int
	AddressBounds int
	AddressSets   int // 0 where another limit is exceeded: it is then not counted
	PortBounds    int
	PortSets      int // as AddressSets
	References    int
}

// Size counts a direction. It is the one count for the command line, the daemon
// and the compiler.
func (rs Rules) Size() Size {
	s := Size{Rules: len(rs.List), References: len(rs.References())}
	addresses, ports := rs.addressSpans(), rs.portSpans()
	s.AddressBounds, s.PortBounds = len(bounds(addresses)), len(bounds(ports))
	if len(s.Over()) > 0 {
		return s // the sets of a direction without any limit could take minutes
	}
	s.AddressSets = len(cut(addresses, s.Rules).Sets)
	s.PortSets = len(cut(ports, s.Rules).Sets)
	return s
}

// Over has one line for every limit that is exceeded.
func (s Size) Over() []string {
	var out []string
	for _, c := range []struct {
		what     string
		n, limit int
	}{
		{"rules", s.Rules, MaxRules},
		{"address boundaries", s.AddressBounds, MaxAddressBounds},
		{"different sets of rules by address", s.AddressSets, MaxAddressSets},
		{"port boundaries", s.PortBounds, MaxPortBounds},
		{"different sets of rules by port", s.PortSets, MaxPortSets},
		{"referenced security groups", s.References, MaxReferences},
	} {
		if c.n > c.limit {
			out = append(out, fmt.Sprintf("has %d %s, at most %d fit", c.n, c.what, c.limit))
		}
	}
	return out
}
