package session

import (
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"

	"github.com/flynn/noise"

	"mknet/spec/pump"
)

// suite is Noise_NNpsk0_25519_AESGCM_SHA256.
var suite = noise.NewCipherSuite(noise.DH25519, noise.CipherAESGCM, noise.HashSHA256)

// Labels of the keys that are derived from a finished handshake.
const (
	labelShimToAgent = "mknet pump 1 data shim to agent"
	labelAgentToShim = "mknet pump 1 data agent to shim"
	labelLatencyLane = "mknet pump 1 latency lane"
)

// channel is a finished handshake: the transport keys of one connection.
type channel struct {
	role          pump.Role
	hash          []byte // the handshake hash, equal on both ends
	send, receive *noise.CipherState
}

func newHandshake(role pump.Role, psk pump.Token, shimHello, agentHello []byte) (*noise.HandshakeState, error) {
	if psk == (pump.Token{}) {
		return nil, fmt.Errorf("%w: no token", ErrAuthentication)
	}
	// The lengths are inside both hellos, so that the concatenation has one reading.
	prologue := append(append(make([]byte, 0, len(shimHello)+len(agentHello)), shimHello...), agentHello...)
	return noise.NewHandshakeState(noise.Config{
		CipherSuite: suite, Pattern: noise.HandshakeNN, Initiator: role == pump.RoleShim, Prologue: prologue,
		// A slice of any other length is taken for "no key" or refused; an array
		// cannot have one.
		PresharedKey: psk[:], PresharedKeyPlacement: 0,
	})
}

// initiate runs the shim's part: MsgInit, MsgReply, MsgConfirm.
func initiate(rw io.ReadWriter, psk pump.Token, shimHello, agentHello []byte) (*channel, error) {
	hs, err := newHandshake(pump.RoleShim, psk, shimHello, agentHello)
	if err != nil {
		return nil, err
	}
	msg, _, _, err := hs.WriteMessage(nil, nil)
	if err != nil {
		return nil, fmt.Errorf("build the first handshake message: %w", err)
	}
	if err := write(rw, pump.AppendMessage(nil, pump.MsgInit, msg)); err != nil {
		return nil, err
	}
	reply, err := pump.ReadMessage(rw, pump.MsgReply)
	if err != nil {
		return nil, classify(err)
	}
	_, toAgent, toShim, err := hs.ReadMessage(nil, reply)
	if err != nil {
		return nil, fmt.Errorf("%w: the agent's handshake message does not open", ErrAuthentication)
	}
	ch := &channel{role: pump.RoleShim, hash: hs.ChannelBinding(), send: toAgent, receive: toShim}
	return ch, ch.write(rw, pump.MsgConfirm, ch.hash)
}

// respond runs the agent's part. When it returns without an error the peer holds
// the token and is alive: it has answered our fresh key. Before that nothing may
// change.
func respond(rw io.ReadWriter, psk pump.Token, shimHello, agentHello []byte) (*channel, error) {
	hs, err := newHandshake(pump.RoleAgent, psk, shimHello, agentHello)
	if err != nil {
		return nil, err
	}
	first, err := pump.ReadMessage(rw, pump.MsgInit)
	if err != nil {
		return nil, classify(err)
	}
	if _, _, _, err := hs.ReadMessage(nil, first); err != nil {
		return nil, fmt.Errorf("%w: the shim's handshake message does not open", ErrAuthentication)
	}
	msg, toAgent, toShim, err := hs.WriteMessage(nil, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: the shim's key is not acceptable", ErrAuthentication)
	}
	if err := write(rw, pump.AppendMessage(nil, pump.MsgReply, msg)); err != nil {
		return nil, err
	}
	ch := &channel{role: pump.RoleAgent, hash: hs.ChannelBinding(), send: toShim, receive: toAgent}
	confirm, err := ch.read(rw, pump.MsgConfirm)
	if err != nil {
		return nil, err
	}
	return ch, ch.checkHash(confirm)
}

func (c *channel) checkHash(got []byte) error {
	if subtle.ConstantTimeCompare(got, c.hash) != 1 {
		return fmt.Errorf("%w: the handshake hash differs", ErrAuthentication)
	}
	return nil
}

// write seals body and sends it as one message.
func (c *channel) write(w io.Writer, t pump.MessageType, body []byte) error {
	// The type is authenticated too: a message cannot be taken for another.
	sealed, err := c.send.Encrypt(nil, []byte{byte(t)}, body)
	if err != nil {
		return fmt.Errorf("seal handshake message %d: %w", t, err)
	}
	return write(w, pump.AppendMessage(nil, t, sealed))
}

// read receives one message and opens it.
func (c *channel) read(r io.Reader, t pump.MessageType) ([]byte, error) {
	sealed, err := pump.ReadMessage(r, t)
	if err != nil {
		return nil, classify(err)
	}
	body, err := c.receive.Decrypt(nil, []byte{byte(t)}, sealed)
	if err != nil {
		return nil, fmt.Errorf("%w: handshake message %d does not open", ErrAuthentication, t)
	}
	return body, nil
}

// dataKeys are the keys of the data frames on this connection, which are never
// those of the handshake messages.
func (c *channel) dataKeys() (send, receive *Key, err error) {
	toAgent, toShim := c.send, c.receive
	if c.role == pump.RoleAgent {
		toAgent, toShim = toShim, toAgent
	}
	a, err := c.derive(toAgent.UnsafeKey(), labelShimToAgent)
	if err != nil {
		return nil, nil, err
	}
	s, err := c.derive(toShim.UnsafeKey(), labelAgentToShim)
	if err != nil {
		return nil, nil, err
	}
	if c.role == pump.RoleAgent {
		return s, a, nil
	}
	return a, s, nil
}

// laneToken is the pre-shared key of the latency lane's own handshake: only who
// finished this one can compute it.
func (c *channel) laneToken() (pump.Token, error) {
	toAgent, toShim := c.send, c.receive
	if c.role == pump.RoleAgent {
		toAgent, toShim = toShim, toAgent
	}
	a, s := toAgent.UnsafeKey(), toShim.UnsafeKey()
	k, err := hkdf.Key(sha256.New, append(a[:], s[:]...), c.hash, labelLatencyLane, pump.TokenBytes)
	if err != nil {
		return pump.Token{}, fmt.Errorf("derive the latency lane's key: %w", err)
	}
	return pump.Token(k), nil
}

func (c *channel) derive(secret [32]byte, label string) (*Key, error) {
	k, err := hkdf.Key(sha256.New, secret[:], c.hash, label, len(Key{}))
	if err != nil {
		return nil, fmt.Errorf("derive %q: %w", label, err)
	}
	return (*Key)(k), nil
}

// write writes all of b or fails; net.Conn promises no less, others may.
func write(w io.Writer, b []byte) error {
	n, err := w.Write(b)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return classify(err)
}

// readHello is pump.ReadHello with our errors.
func readHello(r io.Reader) (pump.Hello, []byte, error) {
	h, raw, err := pump.ReadHello(r)
	var mismatch *pump.MismatchError
	if err != nil && !errors.As(err, &mismatch) {
		err = classify(err)
	}
	return h, raw, err
}
