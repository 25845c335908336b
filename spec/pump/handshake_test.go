package pump

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func TestMessageRoundTrip(t *testing.T) {
	for mt, s := range sizes {
		body := bytes.Repeat([]byte{0xa5}, s.max)
		raw := AppendMessage(nil, mt, body)
		r := bytes.NewReader(append(raw, 'x'))
		got, err := ReadMessage(r, mt)
		if err != nil || !bytes.Equal(got, body) || r.Len() != 1 {
			t.Errorf("type %d: got %d bytes, %v, %d left; want %d bytes and 1 left", mt, len(got), err, r.Len(), len(body))
		}
	}
}

func TestReadMessageRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		raw  []byte
		want error
	}{
		{"empty", nil, io.EOF},
		{"half a header", []byte{1, 0}, io.ErrUnexpectedEOF},
		{"other type", []byte{2, 0, 48}, ErrMalformedMessage},
		{"unknown type", []byte{77, 0, 1, 0}, ErrMalformedMessage},
		{"one byte too long, no body sent", []byte{1, 0, 49}, ErrMalformedMessage},
		{"huge", []byte{1, 0xff, 0xff}, ErrMalformedMessage},
		{"too short", []byte{1, 0, 47}, ErrMalformedMessage},
		{"body cut", append([]byte{1, 0, 48}, make([]byte, 47)...), io.ErrUnexpectedEOF},
		{"long refusal", []byte{6, 0, 2, 1, 1}, ErrMalformedMessage},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := ReadMessage(bytes.NewReader(tt.raw), MsgInit); !errors.Is(err, tt.want) {
				t.Errorf("%x: got %v, want %v", tt.raw, err, tt.want)
			}
		})
	}
	var refused *RefusedError
	raw := AppendMessage(nil, MsgRefuse, []byte{byte(RefusedAuth)})
	if _, err := ReadMessage(bytes.NewReader(raw), MsgReply); !errors.As(err, &refused) || refused.Reason != RefusedAuth {
		t.Errorf("refusal: got %v, want %v", err, RefusedAuth)
	}
}

func FuzzReadMessage(f *testing.F) {
	f.Add([]byte{1, 0, 48}, uint8(1))
	f.Add(AppendMessage(nil, MsgRefuse, []byte{2}), uint8(2))
	f.Add(AppendMessage(nil, MsgConfirm, make([]byte, 48)), uint8(3))
	f.Add(AppendMessage(nil, MsgConfig, make([]byte, 300)), uint8(4))
	f.Fuzz(func(t *testing.T, b []byte, want uint8) {
		body, err := ReadMessage(bytes.NewReader(b), MessageType(want))
		if err != nil {
			return
		}
		if raw := AppendMessage(nil, MessageType(want), body); !bytes.HasPrefix(b, raw) {
			t.Fatalf("%x reads as type %d %x", b, want, body)
		}
	})
}
