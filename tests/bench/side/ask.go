package side

import (
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"net"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Transactions are requests of one byte and their answers, one after the other on
// one connection.
type Transactions struct {
	Count      uint64  `json:"count"`
	CPUSeconds float64 `json:"cpuSeconds"` // of the client
}

// Served is what a server of one connection used.
type Served struct {
	CPUSeconds float64 `json:"cpuSeconds"`
}

// once serves one TCP client and ends, so that its processor time is that client's.
// It writes an empty line when it listens.
func once(_ []string, out io.Writer) error {
	l, err := net.Listen("tcp4", ":"+tcpPort)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(Patience)); err != nil {
		return err
	}
	if _, err := io.WriteString(out, "\n"); err != nil {
		return err
	}
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	err = answer(conn)
	if err := errors.Join(err, conn.Close()); err != nil {
		return err
	}
	var s Served
	if s.CPUSeconds, err = cpuSeconds(); err != nil {
		return err
	}
	return say(out, s)
}

// blocking makes the connection's descriptor a blocking one: the poller would cost
// more than the packets that are measured.
//
// On one CPU the scheduler would besides take the only processor from every read that
// waits and give it back after: with a second, idle one it lets a thread keep what it
// has for 10 ms (runtime.retake).
func blocking(conn net.Conn) (*os.File, error) {
	runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0)))
	f, err := conn.(*net.TCPConn).File()
	if err != nil {
		return nil, err
	}
	t := unix.NsecToTimeval(int64(Patience))
	if err := unix.SetsockoptTimeval(int(f.Fd()), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// echo returns every byte until the end.
func echo(conn net.Conn) error {
	f, err := blocking(conn)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, 4096)
	for fd := int(f.Fd()); ; {
		n, err := unix.Read(fd, b)
		if err == nil && n == 0 {
			return nil
		}
		if err == nil {
			_, err = unix.Write(fd, b[:n])
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// ask sends requests for the given time.
func ask(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("ask", flag.ContinueOnError)
	to := fs.String("to", "", "address of the server")
	window := fs.Duration("for", time.Second, "how long to ask")
	if err := fs.Parse(args); err != nil {
		return err
	}
	conn, err := dial(net.JoinHostPort(*to, tcpPort))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(*window + Patience)); err != nil {
		return err
	}
	if _, err := conn.Write(binary.BigEndian.AppendUint64([]byte{asEcho}, uint64(*window))); err != nil {
		return err
	}
	f, err := blocking(conn)
	if err != nil {
		return err
	}
	defer f.Close()
	var t Transactions
	b := []byte{0}
	fd := int(f.Fd())
	for end := time.Now().Add(*window); time.Now().Before(end); t.Count++ {
		if _, err := unix.Write(fd, b); err != nil {
			return err
		}
		for n := 0; n <= 0; {
			switch n, err = unix.Read(fd, b); {
			case errors.Is(err, unix.EINTR):
			case err != nil:
				return err
			case n == 0:
				return io.ErrUnexpectedEOF
			}
		}
	}
	if t.CPUSeconds, err = cpuSeconds(); err != nil {
		return err
	}
	return say(out, t)
}
