package side

import (
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"net"
	"sync"
	"time"
)

// A client asks with 9 bytes: what the server is to be, and for how long to send, u64
// nanoseconds big endian. A server that was the sink answers with its tally as three
// u64; one that echoes returns what it gets until the end.
const (
	asSink, asSource, asEcho = 0, 1, 2

	requestBytes = 9
	tallyBytes   = 24
)

// Stream is what the sinks of all flows saw.
type Stream struct {
	BitsPerSecond float64 `json:"bitsPerSecond"` // while the sources were sending
	Bits          float64 `json:"bits"`          // until the end: what the link had to carry
	CPUSeconds    float64 `json:"cpuSeconds"`    // of the client
}

// tally is what one sink saw.
type tally struct {
	bytes uint64        // until the end
	early uint64        // bytes of the window
	took  time.Duration // what the window became: a read may end behind it
}

// sink reads until the end and takes the rate over the window that begins with the
// first byte, so that what is still in the buffers of a slow link does not count.
func sink(r io.Reader, window time.Duration) (t tally, err error) {
	b := make([]byte, 256<<10)
	var start time.Time
	for {
		n, err := r.Read(b)
		now := time.Now()
		if start.IsZero() {
			start = now
		}
		t.bytes += uint64(n)
		if t.took < window && err == nil {
			t.early, t.took = t.bytes, now.Sub(start)
		}
		switch {
		case errors.Is(err, io.EOF):
			return t, nil
		case err != nil:
			return t, err
		}
	}
}

func source(w io.Writer, window time.Duration) error {
	b := make([]byte, 128<<10)
	for end := time.Now().Add(window); time.Now().Before(end); {
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// serve answers TCP clients until it is killed.
func serve([]string, io.Writer) error {
	l, err := net.Listen("tcp4", ":"+tcpPort)
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			_ = answer(conn) // the client sees the end and reports it
			conn.Close()
		}()
	}
}

func answer(conn net.Conn) error {
	request := make([]byte, requestBytes)
	if _, err := io.ReadFull(conn, request); err != nil {
		return err
	}
	window := time.Duration(binary.BigEndian.Uint64(request[1:]))
	if err := conn.SetDeadline(time.Now().Add(window + Patience)); err != nil {
		return err
	}
	switch request[0] {
	case asSource:
		return source(conn, window)
	case asEcho:
		return echo(conn)
	}
	t, err := sink(conn, window)
	if err != nil {
		return err
	}
	b := make([]byte, 0, tallyBytes)
	for _, n := range []uint64{t.bytes, t.early, uint64(t.took)} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	_, err = conn.Write(b)
	return err
}

// tcp runs flows through a server.
func tcp(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("tcp", flag.ContinueOnError)
	to := fs.String("to", "", "address of the server")
	flows := fs.Int("flows", 1, "how many at once")
	reverse := fs.Bool("reverse", false, "the server is the source")
	window := fs.Duration("for", time.Second, "how long to send")
	if err := fs.Parse(args); err != nil {
		return err
	}
	tallies, errs := make([]tally, *flows), make([]error, *flows)
	var wg sync.WaitGroup
	for i := range *flows {
		wg.Go(func() { tallies[i], errs[i] = flow(*to, *reverse, *window) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var s Stream
	for _, t := range tallies {
		s.Bits += 8 * float64(t.bytes)
		if t.took > 0 {
			s.BitsPerSecond += 8 * float64(t.early) / t.took.Seconds()
		}
	}
	var err error
	if s.CPUSeconds, err = cpuSeconds(); err != nil {
		return err
	}
	return say(out, s)
}

func flow(to string, reverse bool, window time.Duration) (t tally, err error) {
	conn, err := dial(net.JoinHostPort(to, tcpPort))
	if err != nil {
		return t, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(window + Patience)); err != nil {
		return t, err
	}
	request := make([]byte, 1, requestBytes)
	if reverse {
		request[0] = asSource
	}
	if _, err := conn.Write(binary.BigEndian.AppendUint64(request, uint64(window))); err != nil {
		return t, err
	}
	if reverse {
		return sink(conn, window)
	}
	if err := source(conn, window); err != nil {
		return t, err
	}
	if err := conn.CloseWrite(); err != nil {
		return t, err
	}
	b := make([]byte, tallyBytes)
	if _, err := io.ReadFull(conn, b); err != nil {
		return t, err
	}
	t.bytes, t.early = binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])
	t.took = time.Duration(binary.BigEndian.Uint64(b[16:]))
	return t, nil
}

// dial tries until the link is there.
func dial(address string) (*net.TCPConn, error) {
	for deadline := time.Now().Add(Patience); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.DialTimeout("tcp4", address, time.Second)
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if time.Now().After(deadline) {
			return nil, err
		}
	}
}
