package fdpass_test

import (
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/spec/fdpass"
)

// pair is two ends of a Unix socket.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		conn, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = conn.(*net.UnixConn)
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}

func TestFilesArriveInOrderAndWhole(t *testing.T) {
	a, b := pair(t)
	var sent []*os.File
	for _, text := range []string{"one", "two"} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := w.WriteString(text); err != nil {
			t.Fatal(err)
		}
		w.Close()
		sent = append(sent, r)
	}
	if n, err := fdpass.Send(a, []byte("x"), sent...); n != 1 || err != nil {
		t.Fatalf("sent %d bytes, %v", n, err)
	}
	text, oob := make([]byte, 8), make([]byte, fdpass.Room(len(sent)))
	n, oobn, flags, _, err := b.ReadMsgUnix(text, oob)
	if err != nil || n != 1 || flags&unix.MSG_CTRUNC != 0 {
		t.Fatalf("read %d bytes, flags %#x, %v", n, flags, err)
	}
	files, err := fdpass.Received(oob[:oobn], "passed")
	if err != nil || len(files) != len(sent) {
		t.Fatalf("got %d files, %v", len(files), err)
	}
	for i, want := range []string{"one", "two"} {
		got, err := io.ReadAll(files[i])
		if err != nil || string(got) != want {
			t.Errorf("file %d: got %q, %v", i, got, err)
		}
		if flags, err := unix.FcntlInt(files[i].Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("file %d is inherited by children (%v)", i, err)
		}
		files[i].Close()
	}
}

func TestNothingIsPassed(t *testing.T) {
	a, b := pair(t)
	if n, err := fdpass.Send(a, []byte("x")); n != 1 || err != nil {
		t.Fatalf("sent %d bytes, %v", n, err)
	}
	_, oobn, _, _, err := b.ReadMsgUnix(make([]byte, 8), make([]byte, fdpass.Room(1)))
	if err != nil || oobn != 0 {
		t.Errorf("%d bytes of control messages, %v", oobn, err)
	}
	closed, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	if _, err := fdpass.Send(a, []byte("x"), closed); err == nil {
		t.Error("a closed file was sent")
	}
	if files, err := fdpass.Received([]byte{1, 2, 3}, "x"); len(files) != 0 {
		t.Errorf("a control message of rubbish: %v, %v", files, err)
	}
}
