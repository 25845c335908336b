package pump

import (
	"bytes"
	"encoding/json"
)

// EncodeLinkConfig returns the one encoding of c, or ErrMalformedConfig.
func EncodeLinkConfig(c LinkConfig) ([]byte, error) {
	return encodeJSON(c, MaxLinkConfigBytes)
}

// DecodeLinkConfig reads what EncodeLinkConfig writes, and nothing else: unknown
// and duplicate fields, other spellings and white space are refused.
func DecodeLinkConfig(b []byte) (LinkConfig, error) {
	return decodeJSON[LinkConfig](b, MaxLinkConfigBytes)
}

// EncodeAck returns the one encoding of a, or ErrMalformedConfig.
func EncodeAck(a Ack) ([]byte, error) { return encodeJSON(a, MaxAckBytes) }

// DecodeAck reads what EncodeAck writes, and nothing else.
func DecodeAck(b []byte) (Ack, error) { return decodeJSON[Ack](b, MaxAckBytes) }

type validator interface{ Validate() error }

func encodeJSON(v validator, limit int) ([]byte, error) {
	if err := v.Validate(); err != nil {
		return nil, err
	}
	b, err := marshalJSON(v)
	if err != nil {
		return nil, badConfig("%v", err)
	}
	if len(b) > limit {
		return nil, badConfig("%d bytes, at most %d are allowed", len(b), limit)
	}
	return b, nil
}

func decodeJSON[T validator](b []byte, limit int) (T, error) {
	var v, zero T
	if len(b) > limit {
		return zero, badConfig("%d bytes, at most %d are allowed", len(b), limit)
	}
	// The errors of encoding/json repeat the input, which may hold a token.
	if err := json.Unmarshal(b, &v); err != nil {
		return zero, badConfig("is not the JSON of its type")
	}
	if err := v.Validate(); err != nil {
		return zero, err
	}
	// One value has one encoding: this catches unknown and duplicate fields, other
	// letter case, white space and trailing bytes at once.
	if again, err := marshalJSON(v); err != nil || !bytes.Equal(again, b) {
		return zero, badConfig("is not in canonical form")
	}
	return v, nil
}

// marshalJSON is json.Marshal without HTML escapes, so that another language writes
// the same bytes.
func marshalJSON(v any) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), nil
}

func clipText(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}
