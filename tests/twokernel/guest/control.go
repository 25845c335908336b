package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"mknet/tests/twokernel/wire"
)

// lineSlack is what a request may take beyond its own limit: the line, and a
// guest that is slow.
const lineSlack = 60 * time.Second

// control is the driver's end of the serial line.
type control struct {
	conn *net.UnixConn
	in   *json.Decoder
	out  *json.Encoder
	last int
}

func newControl(conn *net.UnixConn) *control {
	return &control{conn: conn, in: json.NewDecoder(conn), out: json.NewEncoder(conn)}
}

// greeting waits for the guest's first line.
func (c *control) greeting(ctx context.Context) (string, error) {
	defer context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })()
	var r wire.Reply
	if err := c.in.Decode(&r); err != nil {
		return "", errors.Join(context.Cause(ctx), err)
	}
	if r.ID != 0 || r.Output == "" {
		return "", fmt.Errorf("greeting is %+v", r)
	}
	return r.Output, nil
}

func (c *control) ask(q wire.Request) (wire.Reply, error) {
	c.last++
	q.ID = c.last
	if err := c.conn.SetDeadline(time.Now().Add(q.Limit + lineSlack)); err != nil {
		return wire.Reply{}, err
	}
	if err := c.out.Encode(q); err != nil {
		return wire.Reply{}, err
	}
	var r wire.Reply
	switch err := c.in.Decode(&r); {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return r, fmt.Errorf("no answer within %s", q.Limit+lineSlack)
	case err != nil:
		return r, err
	case r.ID != q.ID:
		return r, fmt.Errorf("answer %d to request %d", r.ID, q.ID)
	case r.Error != "":
		return r, errors.New(r.Error)
	}
	return r, nil
}

func (m *Machine) ask(q wire.Request) (wire.Reply, error) {
	r, err := m.control.ask(q)
	if err != nil {
		err = fmt.Errorf("guest %s: %s: %w", m.Name, q.Op, err)
	}
	return r, err
}

// Run runs a shell command line inside, at most for limit. The error is about the
// request; what the command thinks is in the status.
func (m *Machine) Run(line string, limit time.Duration) (output string, status int, err error) {
	r, err := m.ask(wire.Request{Op: wire.Run, Line: line, Limit: limit})
	return r.Output, r.Status, err
}

// Start starts a program in the background.
func (m *Machine) Start(name string, argv ...string) error {
	_, err := m.ask(wire.Request{Op: wire.Start, Name: name, Argv: argv})
	return err
}

// Signal signals a background program.
func (m *Machine) Signal(name string, s syscall.Signal) error {
	_, err := m.ask(wire.Request{Op: wire.Signal, Name: name, Signal: int(s)})
	return err
}

// Wait waits at most for limit until a background program has ended.
func (m *Machine) Wait(name string, limit time.Duration) (status int, ended bool, err error) {
	r, err := m.ask(wire.Request{Op: wire.Wait, Name: name, Limit: limit})
	return r.Status, r.Ended, err
}

// WriteFile writes a file inside.
func (m *Machine) WriteFile(path string, data []byte, mode os.FileMode) error {
	_, err := m.ask(wire.Request{Op: wire.Write, Path: path, Data: data, Mode: uint32(mode.Perm())})
	return err
}

// LogPath is where the output of a background program goes.
func (m *Machine) LogPath(name string) string { return wire.LogPath(name) }
