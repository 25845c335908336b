package pump

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"mknet/shim/tun"
	wire "mknet/spec/pump"
)

// RunNaive carries packets with one read and one write each, no credit, no
// keepalive and no checks: the baseline that the benchmark measures Run against.
// It is for a trusted peer only. It takes ownership of conn and ends with the
// context, whose cause it then returns, or with the first error.
func RunNaive(ctx context.Context, c *Counters, q *tun.Queue, conn net.Conn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c.sessions.Add(1)
	var wg sync.WaitGroup
	wg.Go(func() { cancel(naiveOut(c, q, conn)) })
	wg.Go(func() { cancel(naiveIn(c, q, conn)) })
	<-ctx.Done()
	err := errors.Join(q.SetDeadline(past), conn.Close())
	wg.Wait()
	return errors.Join(context.Cause(ctx), err, q.SetDeadline(time.Time{}))
}

func naiveOut(c *Counters, q *tun.Queue, conn net.Conn) error {
	b := make([]byte, wire.MaxFrameBytes)
	for {
		n, err := q.Read(b[wire.HeaderBytes:])
		if err != nil {
			return err
		}
		wire.PutHeader(b, wire.Data, n)
		if _, err := conn.Write(b[:wire.HeaderBytes+n]); err != nil {
			return err
		}
		c.txPackets.Add(1)
		c.txBytes.Add(uint64(n))
	}
}

func naiveIn(c *Counters, q *tun.Queue, conn net.Conn) error {
	r := bufio.NewReaderSize(conn, 64<<10)
	b := make([]byte, wire.MaxFrameBytes)
	for {
		if _, err := io.ReadFull(r, b[:wire.HeaderBytes]); err != nil {
			return err
		}
		if _, err := wire.Next(b[:wire.HeaderBytes], false); err != nil { // bounds the length
			return err
		}
		n := int(binary.BigEndian.Uint32(b)) - 1
		if _, err := io.ReadFull(r, b[wire.HeaderBytes:wire.HeaderBytes+n]); err != nil {
			return err
		}
		if _, err := q.Write(b[wire.HeaderBytes : wire.HeaderBytes+n]); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, os.ErrClosed) {
				return err
			}
			c.drops[wire.DropTunOther].Add(1)
			continue
		}
		c.rxPackets.Add(1)
		c.rxBytes.Add(uint64(n))
	}
}
