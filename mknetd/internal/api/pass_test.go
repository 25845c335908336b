package api_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

func stat(t testing.TB, f *os.File) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); err != nil {
		t.Fatal(err)
	}
	return st
}

// The engine gets the very file that the caller passed, on every route that takes
// one, and no child of the daemon would inherit it.
func TestDescriptorArrives(t *testing.T) {
	got := make(chan unix.Stat_t, 1)
	seen := func(ns *os.File) {
		if ns == nil {
			got <- unix.Stat_t{}
			return
		}
		raw, _ := ns.SyscallConn()
		_ = raw.Control(func(fd uintptr) {
			if flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("flags %x, %v", flags, err)
			}
		})
		got <- stat(t, ns)
		closeNS(ns)
	}
	c := serve(t, &fake{
		create: func(_ context.Context, r specapi.CreateRequest, ns *os.File, _ endpoint.Process) (endpoint.Endpoint, error) {
			seen(ns)
			return sample(r.Attachment), nil
		},
		del: func(_ context.Context, _ specapi.DeleteRequest, ns *os.File, _ endpoint.Process) (specapi.DeleteReply, error) {
			seen(ns)
			return specapi.DeleteReply{}, nil
		},
		bind: func(_ context.Context, r specapi.BindRequest, ns *os.File, _ endpoint.Process) (specapi.BindReply, error) {
			seen(ns)
			return bound(r.Selector.Generation, r.Sandbox), nil
		},
	}).client(t)
	ns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	want := stat(t, ns)
	ctx := context.Background()
	for name, call := range map[string]func(*os.File) error{
		"create": func(f *os.File) error {
			_, err := c.CreateEndpoint(ctx, specapi.CreateRequest{Attachment: att, NetnsPath: "/n"}, f)
			return err
		},
		"delete": func(f *os.File) error {
			_, err := c.Delete(ctx, specapi.DeleteRequest{Selector: specapi.Selector{Attachment: att}}, f)
			return err
		},
		"bind": func(f *os.File) error {
			_, err := c.BindIn(ctx, specapi.BindRequest{Selector: specapi.Selector{Attachment: att}, Sandbox: sandbox}, f)
			return err
		},
		// A body that does not fit into one write: the descriptor goes once.
		"a long body": func(f *os.File) error {
			search := make([]string, 32)
			for i := range search {
				search[i] = strings.Repeat("a", 250)
			}
			_, err := c.CreateEndpoint(ctx, specapi.CreateRequest{Attachment: att, NetnsPath: "/n", DNS: endpoint.DNS{Search: search}}, f)
			return err
		},
	} {
		for i := range 3 { // a connection each, beside kept ones
			if err := call(ns); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if st := <-got; st.Ino != want.Ino || st.Dev != want.Dev {
				t.Errorf("%s: call %d got inode %d, want %d", name, i, st.Ino, want.Ino)
			}
			if err := call(nil); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if st := <-got; st.Ino != 0 {
				t.Errorf("%s: call %d without a descriptor got inode %d", name, i, st.Ino)
			}
		}
	}
	if stat(t, ns).Ino != want.Ino {
		t.Error("the caller's file is not its own any more")
	}
}

// part is one write of a raw caller: text with some descriptors.
type part struct {
	text string
	fds  int
}

// rawCall writes the parts and returns status and body of the first answer.
func rawCall(t testing.TB, socket string, parts []part) (int, string) {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, p := range parts {
		fds := make([]int, p.fds)
		raw, _ := null.SyscallConn()
		_ = raw.Control(func(fd uintptr) {
			for i := range fds {
				fds[i] = int(fd)
			}
			_, _, err = conn.WriteMsgUnix([]byte(p.text), unix.UnixRights(fds...), nil)
		})
		if err != nil {
			break // the server has hung up; its answer may still be there
		}
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if resp.Close {
		body = append(body, " [close]"...)
	}
	return resp.StatusCode, string(body)
}

func TestDescriptorRules(t *testing.T) {
	body := create("ifName", `"eth0"`)
	head := "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nContent-Length: " + itoa(len(body)) + "\r\n\r\n"
	health := "GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\n\r\n"
	for _, c := range []struct {
		name   string
		parts  []part
		status int
		want   string
	}{
		{"with the first byte", []part{{head + body, 1}}, 201, "[close]"},
		{"with the body", []part{{head, 0}, {body, 1}}, 201, "[close]"},
		{"none", []part{{head + body, 0}}, 201, `"READY"`},
		{"two in one message", []part{{head + body, 2}}, 400, "several descriptors"},
		{"two in two messages", []part{{head, 1}, {body, 1}}, 400, "several descriptors"},
		{"as many as the kernel passes", []part{{head + body, 253}}, 400, "several descriptors"},
		{"where none is taken", []part{{health, 1}}, 400, "takes no descriptor"},
		{"where there is no route", []part{{"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", 1}}, 404, "[close]"},
		{"with what is no HTTP", []part{{"hello\r\n\r\n", 3}}, 400, ""},
		{"without a request", []part{{"G", 1}, {"", 0}}, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, &fake{}) // checks that nothing stays open
			if c.status == 0 {
				conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.socket, Net: "unix"})
				if err != nil {
					t.Fatal(err)
				}
				_, _, err = conn.WriteMsgUnix([]byte("G"), unix.UnixRights(0), nil)
				if err := errors.Join(err, conn.Close()); err != nil {
					t.Fatal(err)
				}
				return
			}
			if status, text := rawCall(t, s.socket, c.parts); status != c.status || !strings.Contains(text, c.want) {
				t.Errorf("got %d %q, want %d %q", status, text, c.status, c.want)
			}
		})
	}
}

// A descriptor must come with the first request of its connection: later, nobody
// could say which request it belongs to.
func TestDescriptorWithLaterRequest(t *testing.T) {
	s := serve(t, &fake{})
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(conn)
	body := create("ifName", `"eth0"`)
	for i, c := range []struct {
		text   string
		oob    []byte
		status int
	}{
		{"GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\n\r\n", nil, 200},
		{"POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nContent-Length: " + itoa(len(body)) + "\r\n\r\n" + body, unix.UnixRights(0), 400},
	} {
		if _, _, err := conn.WriteMsgUnix([]byte(c.text), c.oob, nil); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		if resp.StatusCode != c.status {
			t.Errorf("request %d: status %d, want %d", i+1, resp.StatusCode, c.status)
		}
	}
}

func TestDescriptorsNeedTheUnixSocket(t *testing.T) {
	c, err := client.New("tcp://127.0.0.1:1", client.WithTLS(clientTLS(t)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.CreateEndpoint(context.Background(), specapi.CreateRequest{Attachment: att}, os.Stdin); specapi.CodeOf(err) != specapi.Unsupported {
		t.Errorf("create: %v", err)
	}
	if _, _, err := c.Attach(context.Background(), sampleGen, attachRequest(1)); specapi.CodeOf(err) != specapi.Unsupported {
		t.Errorf("attach: %v", err)
	}
}

// FuzzDescriptorPassing sends any bytes, cut into writes anywhere, with any number
// of descriptors: nothing panics and nothing stays open.
func FuzzDescriptorPassing(f *testing.F) {
	body := create("ifName", `"eth0"`)
	whole := "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: " + itoa(len(body)) + "\r\n\r\n" + body
	f.Add([]byte(whole), byte(1), byte(20), byte(0))
	f.Add([]byte(whole), byte(3), byte(255), byte(2))
	f.Add([]byte(whole[:40]), byte(1), byte(5), byte(9))
	f.Add([]byte("GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), byte(0), byte(0), byte(1))
	f.Add([]byte("\x00\x01"), byte(4), byte(1), byte(4))
	f.Fuzz(func(t *testing.T, text []byte, first, cut, second byte) {
		s := serve(t, &fake{})
		at := min(int(cut), len(text))
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, p := range []struct {
			b []byte
			n byte
		}{{text[:at], first}, {text[at:], second}} {
			if len(p.b) == 0 {
				continue
			}
			fds := make([]int, p.n%8)
			_, _, _ = conn.WriteMsgUnix(p.b, unix.UnixRights(fds...), nil)
		}
		_ = conn.CloseWrite()
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		_, _ = io.Copy(io.Discard, conn)
	})
}
