package pump

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Reason says in a Close frame why a side ends the session, so that the other
// knows whether to come back.
type Reason uint16

// Reasons. One that the receiver does not know is treated like Shutdown.
const (
	Shutdown     Reason = 1 // the program ends or restarts: connect again
	Unbound      Reason = 2 // the binding is gone: do not come back
	Displaced    Reason = 3 // a newer confirmed session took over
	Protocol     Reason = 4 // the peer sent a malformed frame or broke its credit
	LocalFault   Reason = 5 // the TUN failed: connect again
	Unresponsive Reason = 6 // nothing came from the peer for too long
	Reconfigure  Reason = 7 // connect again to get another link configuration
)

func (r Reason) String() string {
	names := [...]string{"", "shutdown", "unbound", "displaced", "protocol", "local-fault", "unresponsive", "reconfigure"}
	if r == 0 || int(r) >= len(names) {
		return fmt.Sprintf("reason %d", uint16(r))
	}
	return names[r]
}

// AppendClose adds a Close frame to b; text beyond MaxCloseTextBytes is cut.
func AppendClose(b []byte, r Reason, text string) []byte {
	if len(text) > MaxCloseTextBytes {
		text = text[:MaxCloseTextBytes]
	}
	return Append(b, Close, append(binary.BigEndian.AppendUint16(nil, uint16(r)), text...))
}

// CloseText reads the body of a Close frame; Next has checked its size. What is
// not printable in the text is replaced, since it ends in logs.
func CloseText(body []byte) (Reason, string) {
	text := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == utf8.RuneError || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, string(body[2:]))
	return Reason(binary.BigEndian.Uint16(body)), text
}
