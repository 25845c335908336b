package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"mknet/spec/pump"
)

// Client is the shim's end. All fields but NextToken and Timeout must be set.
type Client struct {
	Dial     func(ctx context.Context) (net.Conn, error)
	Identity Identity
	Token    pump.Token
	// NextToken returns the token to use from now on, already kept where a
	// restart finds it. It is called when the agent holds a single-use token,
	// after the agent has proven that it knows that one.
	NextToken func() (pump.Token, error)
	Timeout   time.Duration // of one handshake; default DefaultTimeout
}

// Open dials and authenticates a session with the given offer: first the bulk
// lane, then, if both ends want it, the latency lane. The caller owns the
// session. Every connection of a failed call is closed. The error is one of
// this package's, a *pump.MismatchError, or that of Dial.
func (c *Client) Open(ctx context.Context, offer pump.LinkConfig) (*Session, error) {
	bulk, err := c.connect(ctx, pump.LaneBulk, c.Token)
	if err != nil {
		return nil, err
	}
	s, laneToken, err := c.configure(ctx, bulk, offer)
	if err != nil {
		return nil, errors.Join(withContext(ctx, err), bulk.close())
	}
	if s.Ack.Lanes == pump.MaxLanes {
		if err := c.addLatencyLane(ctx, s, laneToken); err != nil {
			return nil, errors.Join(fmt.Errorf("latency lane: %w", err), s.Close())
		}
	}
	return s, nil
}

// connect dials one connection and runs its handshake up to MsgConfirm.
func (c *Client) connect(ctx context.Context, lane uint8, psk pump.Token) (*link, error) {
	conn, err := c.Dial(ctx)
	if err != nil {
		return nil, withContext(ctx, err)
	}
	l := &link{conn: conn, release: guard(ctx, conn, c.timeout())}
	if err := c.shake(l, lane, psk); err != nil {
		refuse(conn, err)
		return nil, errors.Join(withContext(ctx, err), l.close())
	}
	return l, nil
}

func (c *Client) shake(l *link, lane uint8, psk pump.Token) error {
	l.ours = pump.Hello{
		MinVersion: pump.MinVersion, MaxVersion: pump.MaxVersion, Role: pump.RoleShim, Lane: lane,
		Endpoint: c.Identity.Endpoint, Sandbox: c.Identity.Sandbox,
	}
	raw, err := l.ours.Append(nil)
	if err != nil {
		return err
	}
	if err := write(l.conn, raw); err != nil {
		return err
	}
	theirs, theirRaw, err := readHello(l.conn)
	if err != nil {
		return err
	}
	l.theirs = theirs
	if err := pump.Match(l.ours, theirs); err != nil {
		return err
	}
	l.ch, err = initiate(l.conn, psk, raw, theirRaw)
	return err
}

// configure sends the link configuration over the confirmed bulk lane and reads
// the agent's answer.
func (c *Client) configure(ctx context.Context, l *link, offer pump.LinkConfig) (*Session, pump.Token, error) {
	s := &Session{role: pump.RoleShim, Endpoint: c.Identity.Endpoint, Version: pump.Agreed(l.ours, l.theirs)}
	offer.NextToken = nil
	if l.theirs.Flags&pump.FlagSingleUse != 0 {
		if c.NextToken == nil {
			return nil, pump.Token{}, fmt.Errorf("%w: there is no place to keep the next one", ErrNextToken)
		}
		next, err := c.NextToken()
		if err != nil {
			return nil, pump.Token{}, fmt.Errorf("%w: %w", ErrNextToken, err)
		}
		offer.NextToken, s.Rotated = &next, true
	}
	body, err := pump.EncodeLinkConfig(offer)
	if err != nil {
		return nil, pump.Token{}, err
	}
	if err := l.ch.write(l.conn, pump.MsgConfig, body); err != nil {
		return nil, pump.Token{}, err
	}
	answer, err := l.ch.read(l.conn, pump.MsgAck)
	if err != nil {
		return nil, pump.Token{}, err
	}
	if s.Ack, err = pump.DecodeAck(answer); err != nil {
		return nil, pump.Token{}, err
	}
	switch {
	case s.Ack.Refused != "":
		return nil, pump.Token{}, &RefusedError{Text: s.Ack.Refused}
	case s.Ack.Lanes > offer.Lanes:
		return nil, pump.Token{}, fmt.Errorf("%w: %d lanes answered, %d offered", pump.ErrMalformedConfig, s.Ack.Lanes, offer.Lanes)
	}
	offer.NextToken = nil
	s.Config = offer
	token, err := l.ch.laneToken()
	if err != nil {
		return nil, pump.Token{}, err
	}
	return s, token, s.add(ctx, l, pump.LaneBulk)
}

func (c *Client) addLatencyLane(ctx context.Context, s *Session, token pump.Token) error {
	l, err := c.connect(ctx, pump.LaneLatency, token)
	if err != nil {
		return err
	}
	answer, err := l.ch.read(l.conn, pump.MsgAck)
	if err == nil {
		err = l.ch.checkHash(answer)
	}
	if err == nil {
		err = s.add(ctx, l, pump.LaneLatency)
	}
	if err != nil {
		return errors.Join(withContext(ctx, err), l.close())
	}
	return nil
}

// add ends the handshake's deadline and makes l a lane of the session.
func (s *Session) add(ctx context.Context, l *link, number int) error {
	lane := Lane{Number: number, Conn: l.conn}
	if s.Config.Sealed {
		var err error
		if lane.Send, lane.Receive, err = l.ch.dataKeys(); err != nil {
			return err
		}
	}
	if err := l.release(); err != nil {
		return withContext(ctx, classify(err))
	}
	s.Lanes = append(s.Lanes, lane)
	return nil
}

func (c *Client) timeout() time.Duration {
	if c.Timeout > 0 {
		return c.Timeout
	}
	return DefaultTimeout
}

// refuse tells the peer why, as far as it may know, within the deadline that the
// connection has. The peer may be gone: that is no error here.
func refuse(conn net.Conn, err error) {
	if reason, ok := refusalFor(err); ok {
		_ = write(conn, pump.AppendMessage(nil, pump.MsgRefuse, []byte{byte(reason)}))
	}
}
