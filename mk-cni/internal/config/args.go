package config

import (
	"net"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/endpoint"
)

// Args is CNI_ARGS: KEY=VALUE pairs with semicolons between, in any order. Of a
// key that is given twice the last counts, as in the reference library.
type Args struct {
	Pod              endpoint.Pod
	InfraContainerID string
	MAC              net.HardwareAddr // nil: none asked for
	IP               netip.Addr       // zero: none asked for
	Gateway          string           // for an IPAM plugin (static), which reads it itself
}

// ParseArgs reads CNI_ARGS. Unknown keys are problems unless IgnoreUnknown is
// true, wherever it stands in the list.
func ParseArgs(s string) (Args, []Problem) {
	var a Args
	p := &parser{}
	var unknown []string
	ignoreUnknown := false
	for pair := range strings.SplitSeq(s, ";") {
		if pair == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok {
			p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS", pair, "must be KEY=VALUE pairs with semicolons between")
			continue
		}
		switch key {
		case "IgnoreUnknown":
			switch strings.ToLower(value) {
			case "1", "true":
				ignoreUnknown = true
			case "0", "false":
				ignoreUnknown = false
			default:
				p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS IgnoreUnknown", value, "must be true, false, 1 or 0")
			}
		case "K8S_POD_NAMESPACE":
			p.word(key, value, &a.Pod.Namespace)
		case "K8S_POD_NAME":
			p.word(key, value, &a.Pod.Name)
		case "K8S_POD_UID":
			p.word(key, value, &a.Pod.UID)
		case "K8S_POD_INFRA_CONTAINER_ID":
			p.word(key, value, &a.InfraContainerID)
		case "MAC":
			mac, err := parseMAC(value)
			if err != nil {
				p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS MAC", value, "%v", err)
			}
			a.MAC = mac
		case "IP":
			ip, err := parseIP(value)
			if err != nil {
				p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS IP", value, "%v", err)
			}
			a.IP = ip
		case "GATEWAY":
			p.word(key, value, &a.Gateway)
		default:
			unknown = append(unknown, pair)
		}
	}
	if ignoreUnknown {
		a.Gateway = ""
	} else {
		for _, pair := range unknown {
			p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS", pair, "mk-cni does not know this key; add IgnoreUnknown=1 to have it ignored")
		}
	}
	return a, p.problems
}

// word keeps a value that names something of Kubernetes: it ends up in records,
// logs and tables.
func (p *parser) word(key, value string, to *string) {
	if len(value) > 253 || strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r > '~' }) {
		p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS "+key, value, "must be at most 253 printable characters")
		return
	}
	*to = value
}

// VethProblems are the arguments that an ordinary pod cannot honour; delegates says
// whether an IPAM plugin gives its address.
func (a Args) VethProblems(delegates bool) []Problem {
	p := &parser{}
	if !delegates {
		p.gateway(a)
	}
	if a.MAC != nil && a.MAC[0]&1 != 0 {
		p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS MAC", a.MAC.String(), "is a group address, an interface has its own")
	}
	if a.IP.IsValid() && !a.IP.Is4() {
		p.add(types.ErrUnsupportedField, "CNI_ARGS IP", a.IP, "endpoints have IPv4 addresses only")
	}
	return p.problems
}

// MultikernelProblems are the arguments that an endpoint made of a TUN cannot
// honour.
func (a Args) MultikernelProblems() []Problem {
	p := &parser{}
	p.gateway(a)
	if a.MAC != nil {
		p.add(types.ErrUnsupportedField, "CNI_ARGS MAC", a.MAC.String(), noMAC)
	}
	if a.IP.IsValid() && !a.IP.Is4() {
		p.add(types.ErrUnsupportedField, "CNI_ARGS IP", a.IP, "multikernel endpoints have IPv4 addresses only")
	}
	return p.problems
}

func (p *parser) gateway(a Args) {
	if a.Gateway != "" {
		p.add(types.ErrInvalidEnvironmentVariables, "CNI_ARGS GATEWAY", a.Gateway, "is for an IPAM plugin and none is configured")
	}
}
