package pump

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
)

// TokenBytes is the length of a sandbox token.
const TokenBytes = 32

// Token is a sandbox token. It prints as nothing but its kind, so that it cannot
// end up in a log.
type Token [TokenBytes]byte

func (Token) String() string { return "token(secret)" }

// GoString keeps %#v from showing the bytes.
func (Token) GoString() string { return "token(secret)" }

// MarshalText is the wire form inside a sealed LinkConfig: 64 hex digits.
func (t Token) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(t[:])), nil }

// UnmarshalText reads 64 hex digits and nothing else.
func (t *Token) UnmarshalText(b []byte) error {
	if len(b) != 2*TokenBytes {
		return fmt.Errorf("token has %d digits, must have %d", len(b), 2*TokenBytes)
	}
	if _, err := hex.Decode(t[:], b); err != nil {
		return errors.New("token is not hexadecimal") // the cause would repeat a byte of it
	}
	return nil
}

// ParseToken reads a token as a file holds it: 32 raw bytes, or 64 hexadecimal
// digits with at most one newline after them. Every other length is refused, the
// empty one first of all: a Noise library takes it for "no token".
func ParseToken(b []byte) (Token, error) {
	var t Token
	digits := bytes.TrimSuffix(b, []byte("\n"))
	switch {
	case len(b) == TokenBytes:
		copy(t[:], b)
	case len(digits) == 2*TokenBytes:
		if err := t.UnmarshalText(digits); err != nil {
			return Token{}, err
		}
	default:
		return Token{}, fmt.Errorf("token has %d bytes, must have %d, or %d hexadecimal digits", len(b), TokenBytes, 2*TokenBytes)
	}
	if t == (Token{}) {
		return Token{}, errors.New("token is all zero")
	}
	return t, nil
}
