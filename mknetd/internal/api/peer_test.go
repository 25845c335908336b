package api_test

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/api"
	"mknet/tests/netlab"
)

// healthWith asks for the daemon's health while mknetd, which is this process, can
// open so many descriptors more. The caller's own is there before.
func healthWith(t *testing.T, socket string, spare int) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience.Seconds())}); err != nil {
		t.Fatal(err)
	}
	defer netlab.Exhaust(t, spare)()
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, []byte("GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	var answer strings.Builder
	buf := make([]byte, 4096)
	for {
		n, err := unix.Read(fd, buf)
		if err != nil {
			t.Fatalf("after %q: %v", answer.String(), err)
		}
		if n == 0 {
			return answer.String()
		}
		answer.Write(buf[:n])
	}
}

// A caller that cannot be identified for want of a descriptor is told to come again.
// Taken for nobody, it could not ATTACH, and its UNBIND would kill it.
func TestCallerIsIdentifiedOrComesAgain(t *testing.T) {
	for _, group := range []int{-1, 4242} {
		for spare := 1; spare <= 2; spare++ { // the connection's own, then the pidfd or what /proc says of its groups
			t.Run(fmt.Sprintf("group %d, %d descriptors", group, spare), func(t *testing.T) {
				s := serve(t, &fake{}, func(cfg *api.Config) { cfg.SocketGID = group }) // a new one: nothing of the last caller's is still open
				answer := healthWith(t, s.socket, spare)
				if !strings.Contains(answer, " 503 ") || !strings.Contains(answer, `"retryable":true`) || !strings.Contains(answer, "LimitNOFILE") {
					t.Errorf("got %q, want 503, retryable", answer)
				}
				if answer := healthWith(t, s.socket, 8); !strings.Contains(answer, " 200 ") {
					t.Errorf("with descriptors: got %q, want 200", answer)
				}
			})
		}
	}
}
