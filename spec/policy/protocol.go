package policy

import (
	"encoding/json"
	"strconv"
	"strings"
)

// Protocol is an IP protocol number, 0 to 255, or AnyProtocol.
type Protocol uint16

// AnyProtocol lies outside of the numbers, so that each of them can be named, 0
// (hop-by-hop options) included.
const AnyProtocol Protocol = 0xFFFF

// The protocols that have a name in documents (IANA protocol numbers).
const (
	ICMP Protocol = 1
	TCP  Protocol = 6
	UDP  Protocol = 17
	GRE  Protocol = 47
	ESP  Protocol = 50
	AH   Protocol = 51
	SCTP Protocol = 132
)

var protocolNames = map[Protocol]string{
	AnyProtocol: "all", ICMP: "icmp", TCP: "tcp", UDP: "udp", SCTP: "sctp", GRE: "gre", ESP: "esp", AH: "ah",
}

var protocolNumbers = func() map[string]Protocol {
	m := map[string]Protocol{}
	for p, name := range protocolNames {
		m[name] = p
	}
	return m
}()

// ParseProtocol reads a name in any case, or a number from 0 to 255.
func ParseProtocol(s string) (Protocol, bool) {
	if p, ok := protocolNumbers[strings.ToLower(s)]; ok {
		return p, true
	}
	n, err := strconv.ParseUint(s, 10, 8)
	return Protocol(n), err == nil
}

// HasPorts reports whether packets of the protocol carry a destination port in
// their third and fourth byte.
func (p Protocol) HasPorts() bool { return p == TCP || p == UDP || p == SCTP }

func (p Protocol) String() string {
	if name, ok := protocolNames[p]; ok {
		return name
	}
	return strconv.Itoa(int(p))
}

// MarshalJSON writes a name where there is one, else the number.
func (p Protocol) MarshalJSON() ([]byte, error) {
	if name, ok := protocolNames[p]; ok {
		return json.Marshal(name)
	}
	return json.Marshal(uint16(p))
}
