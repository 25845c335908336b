package api_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

var sampleGen = endpoint.NewGeneration()

func attachRequest(queues int) specapi.AttachRequest {
	return specapi.AttachRequest{Sandbox: sandbox, Nonce: strings.Repeat("0a", 16), Queues: queues}
}

// pipes makes an engine that hands out the write ends of n pipes, and returns the
// read ends.
func pipes(t *testing.T, n int, grow int) (*fake, *shared[[]*os.File]) {
	t.Helper()
	var readers shared[[]*os.File]
	cleanup := func() {
		for _, r := range readers.get() {
			_ = r.Close()
		}
	}
	return &fake{cleanup: cleanup, attach: func(_ context.Context, gen endpoint.Generation, req specapi.AttachRequest, peer endpoint.Process) (specapi.AttachReply, []*os.File, error) {
		var writers []*os.File
		for range n {
			r, w, err := os.Pipe()
			if err != nil {
				return specapi.AttachReply{}, nil, err
			}
			readers.set(append(readers.get(), r))
			writers = append(writers, w)
		}
		ep := sample(att)
		ep.Generation = gen
		for range grow { // makes the message larger than one socket buffer
			ep.Degraded = append(ep.Degraded, strings.Repeat("x", 1000))
		}
		if peer.PID != os.Getpid() {
			return specapi.AttachReply{}, writers, errors.New("wrong peer")
		}
		return specapi.AttachReply{Endpoint: ep, VnetHdr: true}, writers, nil
	}}, &readers
}

func TestAttach(t *testing.T) {
	for _, c := range []struct {
		name       string
		n, degrade int
	}{{"one queue", 1, 0}, {"four queues", 4, 0}, {"a long message", 2, 800}} {
		t.Run(c.name, func(t *testing.T) {
			f, readers := pipes(t, c.n, c.degrade)
			cl := serve(t, f).client(t)
			rep, files, err := cl.Attach(context.Background(), sampleGen, attachRequest(c.n))
			if err != nil {
				t.Fatal(err)
			}
			if rep.Queues != c.n || len(files) != c.n || !rep.VnetHdr || rep.Endpoint.Generation != sampleGen || len(rep.Endpoint.Degraded) != c.degrade {
				t.Errorf("got %d files, %+v", len(files), rep)
			}
			for i, w := range files {
				raw, err := w.SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				_ = raw.Control(func(fd uintptr) {
					if flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
						t.Errorf("queue %d: flags %x, %v: a child would inherit it", i, flags, err)
					}
				})
				if _, err := w.WriteString("hello"); err != nil {
					t.Fatal(err)
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				// The end of file proves that the server kept no copy.
				if got, err := io.ReadAll(readers.get()[i]); err != nil || string(got) != "hello" {
					t.Errorf("queue %d: got %q, %v", i, got, err)
				}
			}
		})
	}
}

func TestAttachRefusals(t *testing.T) {
	t.Run("by the engine", func(t *testing.T) {
		cl := serve(t, &fake{}).client(t)
		_, files, err := cl.Attach(context.Background(), sampleGen, attachRequest(1))
		if specapi.CodeOf(err) != specapi.FailedPrecondition || files != nil {
			t.Errorf("got %v", err)
		}
	})
	t.Run("another number of queues than asked", func(t *testing.T) {
		f, _ := pipes(t, 2, 0)
		cl := serve(t, f).client(t)
		var bad *client.ReplyError
		if _, files, err := cl.Attach(context.Background(), sampleGen, attachRequest(1)); !errors.As(err, &bad) || files != nil {
			t.Errorf("got %v", err)
		}
	})
	t.Run("too many queues from the engine", func(t *testing.T) {
		f, _ := pipes(t, 5, 0)
		cl := serve(t, f).client(t)
		if _, _, err := cl.Attach(context.Background(), sampleGen, attachRequest(4)); specapi.CodeOf(err) != specapi.Internal {
			t.Errorf("got %v", err)
		}
	})
	t.Run("an engine that fails late", func(t *testing.T) {
		inner, _ := pipes(t, 2, 0)
		f := &fake{cleanup: inner.cleanup, attach: func(ctx context.Context, g endpoint.Generation, r specapi.AttachRequest, p endpoint.Process) (specapi.AttachReply, []*os.File, error) {
			_, files, _ := inner.attach(ctx, g, r, p)
			return specapi.AttachReply{}, files, specapi.Errorf(specapi.StaleGeneration, "late")
		}}
		cl := serve(t, f).client(t)
		if _, _, err := cl.Attach(context.Background(), sampleGen, attachRequest(2)); specapi.CodeOf(err) != specapi.StaleGeneration {
			t.Errorf("got %v", err)
		}
	})
}

// A caller that goes away before the message leaves nothing open.
func TestAttachCallerVanishes(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	inner, readers := pipes(t, 2, 0)
	f := &fake{cleanup: inner.cleanup, attach: func(ctx context.Context, g endpoint.Generation, r specapi.AttachRequest, p endpoint.Process) (specapi.AttachReply, []*os.File, error) {
		close(entered)
		<-leave
		return inner.attach(ctx, g, r, p)
	}}
	s := serve(t, f)
	cl := s.client(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		_, _, err := cl.Attach(ctx, sampleGen, attachRequest(2))
		done <- err
	}()
	<-entered
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	close(leave)
	s.stop()
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
	s.ended <- nil
	for _, r := range readers.get() {
		if _, err := io.ReadAll(r); err != nil { // ends once every write end is closed
			t.Error(err)
		}
	}
}

// A daemon that answers nonsense costs the client nothing but an error.
func TestAttachHostileServer(t *testing.T) {
	const upgrade = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: mknet-attach/1\r\n\r\n"
	for _, c := range []struct {
		name, answer string
		fds          int
	}{
		{"nothing", "", 0},
		{"no HTTP", "hello\n", 0},
		{"the head only", upgrade, 1},
		{"another protocol", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: chat\r\n\r\n{}", 1},
		{"no JSON", upgrade + "x", 1},
		{"no descriptors", upgrade + `{"endpoint":{},"queues":1,"vnetHdr":true}`, 0},
		{"more descriptors than fit", upgrade + "{}", 20},
		{"200", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 1},
		{"a body without an end", upgrade + strings.Repeat(" ", 1<<20), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkLeaks(t)
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				conn, err := l.AcceptUnix()
				if err != nil {
					return
				}
				defer conn.Close()
				buf := make([]byte, 4096)
				_, _ = conn.Read(buf)
				fds := make([]int, c.fds)
				for i := range fds {
					fds[i] = 0 // standard input, only to have one
				}
				_, _, _ = conn.WriteMsgUnix([]byte(c.answer), unix.UnixRights(fds...), nil)
			}()
			cl, err := client.New(path)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if _, files, err := cl.Attach(ctx, sampleGen, attachRequest(1)); err == nil || files != nil {
				t.Errorf("accepted: %v, %d files", err, len(files))
			}
		})
	}
}
