package nftrace

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// ErrUnsupported is returned, wrapped, where the kernel has no nf_tables or cannot
// give a table an owner (Linux before 5.12): count instead.
var ErrUnsupported = errors.New("this kernel cannot trace by a table with an owner")

const (
	// answerTime bounds the wait for the kernel's answer to a request; a commit waits
	// for those of others, which take 1.5 s at 16,384 endpoints.
	answerTime = 20 * time.Second
	// bufferBytes is the room for messages that are not read yet; each takes about
	// 1 KiB of it.
	bufferBytes = 4 << 20
	// queueSteps is how many steps a trace may be behind its reader.
	queueSteps = 4096
)

// Trace tells of the packets of one flow until Close.
type Trace struct {
	table string
	owner *netlink.Conn // the table lives as long as this socket
	heard *netlink.Conn
	steps chan Step
	read  sync.WaitGroup
	lost  atomic.Uint64
	once  sync.Once
}

// Open begins to tell of the packets of a flow. The caller closes it.
func Open(f Filter) (*Trace, error) {
	t, err := open(f)
	if err != nil {
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOENT) {
			err = errors.Join(ErrUnsupported, err)
		}
		return nil, fmt.Errorf("trace by nf_tables: %w", err)
	}
	return t, nil
}

func open(f Filter) (_ *Trace, err error) {
	var id [4]byte
	rand.Read(id[:]) // never fails
	t := &Trace{table: endpoint.TraceTablePrefix + hex.EncodeToString(id[:]), steps: make(chan Step, queueSteps)}
	messages, err := batch(t.table, f)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.closeSockets())
		}
	}()
	if t.heard, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		return nil, err
	}
	if err := t.heard.SetReadBuffer(bufferBytes); err != nil {
		return nil, err
	}
	if err := t.heard.JoinGroup(unix.NFNLGRP_NFTRACE); err != nil {
		return nil, err
	}
	if t.owner, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		return nil, err
	}
	if err := t.owner.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return nil, err
	}
	if _, err := t.owner.SendMessages(messages); err != nil {
		return nil, err
	}
	// One answer: what is wrong first, or the acknowledgement of the last rule.
	if _, err := t.owner.Receive(); err != nil {
		return nil, fmt.Errorf("make table %s: %w", t.table, err)
	}
	t.read.Go(func() { t.follow(newFlow(t.table, f)) })
	return t, nil
}

// Table is the name of the trace's table, of the family ip.
func (t *Trace) Table() string { return t.table }

// Steps is where steps come, in the order of each CPU. It is closed by Close, and
// where the socket breaks.
func (t *Trace) Steps() <-chan Step { return t.steps }

// Lost is how many steps found no room, at least: where the kernel had none for its
// messages it says only that, once for each time, not how many there were.
func (t *Trace) Lost() uint64 { return t.lost.Load() }

// follow passes steps on until the socket is closed.
func (t *Trace) follow(f *flow) {
	defer close(t.steps)
	for {
		messages, err := t.heard.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			t.lost.Add(1)
			continue
		}
		if err != nil {
			return
		}
		now := time.Now()
		for _, raw := range messages {
			m, err := parse(raw)
			if err != nil {
				continue // not of a trace, or of a kernel that says it otherwise
			}
			s, ok := f.next(m, now)
			if !ok {
				continue
			}
			select {
			case t.steps <- s:
			default:
				t.lost.Add(1)
			}
		}
	}
}

// LeftOut is how many packets of the flow were not traced, because more came than are
// marked in a second.
func (t *Trace) LeftOut() (uint64, error) {
	m, err := request(unix.NFT_MSG_GETRULE, netlink.Dump, func(e *netlink.AttributeEncoder) { e.String(ruleTable, t.table) })
	if err != nil {
		return 0, err
	}
	if err := t.owner.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return 0, err
	}
	answers, err := t.owner.Execute(m)
	if err != nil {
		return 0, fmt.Errorf("read the counters of table %s: %w", t.table, err)
	}
	out := uint64(0)
	for _, a := range answers {
		if c, ok := countersOf(a, t.table); ok {
			out += c[0] - min(c[0], c[1]) // they are not read at one moment
		}
	}
	return out, nil
}

// countersOf are the two counters of a rule of the table.
func countersOf(m netlink.Message, table string) (c [2]uint64, ok bool) {
	if len(m.Data) < 4 {
		return c, false
	}
	d, err := netlink.NewAttributeDecoder(m.Data[4:])
	if err != nil {
		return c, false
	}
	d.ByteOrder = binary.BigEndian
	n, ours := 0, false
	count := func(d *netlink.AttributeDecoder) error {
		for d.Next() {
			if d.Type() == counterPackets && n < len(c) {
				c[n] = d.Uint64()
				n++
			}
		}
		return nil
	}
	one := func(d *netlink.AttributeDecoder) error {
		is := false
		for d.Next() {
			switch d.Type() {
			case exprName:
				is = name(d) == "counter"
			case exprData:
				if is {
					d.Nested(count)
				}
			}
		}
		return nil
	}
	for d.Next() {
		switch d.Type() {
		case ruleTable:
			ours = name(d) == table
		case ruleExpressions:
			d.Nested(func(d *netlink.AttributeDecoder) error {
				for d.Next() {
					d.Nested(one)
				}
				return nil
			})
		}
	}
	return c, ours && n == len(c) && d.Err() == nil
}

// Close ends the trace and removes its table; again is success.
func (t *Trace) Close() error {
	var err error
	t.once.Do(func() {
		err = t.closeSockets()
		t.read.Wait()
	})
	if err != nil {
		return fmt.Errorf("end the trace by table %s: %w", t.table, err)
	}
	return nil
}

func (t *Trace) closeSockets() error {
	var errs []error
	for _, c := range []*netlink.Conn{t.owner, t.heard} {
		if c != nil {
			if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrClosed) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
