package api_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/api"
	"mknet/spec/client"
)

func listen(t *testing.T, socket string, gid int) (*api.Server, error) {
	t.Helper()
	srv, err := api.New(api.Config{Engine: &fake{}, Log: slog.New(slog.DiscardHandler), Socket: socket, SocketGID: gid})
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Listen(t.Context()); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if err := srv.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return srv, nil
}

func TestSocketModes(t *testing.T) {
	old := unix.Umask(0)
	defer unix.Umask(old)
	for _, c := range []struct {
		name      string
		umask     int
		gid       int
		mode, dir os.FileMode
	}{
		{"root only", 0, -1, 0o600, 0o700},
		{"root only, tight umask", 0o777, -1, 0o600, 0o700},
		{"with a group", 0o077, 4242, 0o660, 0o710},
	} {
		t.Run(c.name, func(t *testing.T) {
			base := t.TempDir()
			if err := os.Chmod(base, 0o755); err != nil {
				t.Fatal(err)
			}
			if c.umask == 0o777 { // a folder made under it could not be entered
				if err := os.Mkdir(filepath.Join(base, "run"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			unix.Umask(c.umask)
			defer unix.Umask(0)
			path := filepath.Join(base, "run", "mknetd.sock")
			srv, err := listen(t, path, c.gid)
			if err != nil {
				t.Fatal(err)
			}
			for p, want := range map[string]os.FileMode{path: c.mode, filepath.Dir(path): c.dir} {
				fi, err := os.Lstat(p)
				if err != nil {
					t.Fatal(err)
				}
				st := fi.Sys().(*syscall.Stat_t)
				if fi.Mode().Perm() != want || st.Uid != 0 || c.gid >= 0 && int(st.Gid) != c.gid {
					t.Errorf("%s: mode %o uid %d gid %d, want mode %o", p, fi.Mode().Perm(), st.Uid, st.Gid, want)
				}
			}
			if err := srv.Close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
}

func TestSocketPlacesThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(t *testing.T, dir string) string // returns the socket path
		want string
	}{
		{"relative", func(*testing.T, string) string { return "a.sock" }, "absolute"},
		{"not clean", func(_ *testing.T, d string) string { return d + "/../" + filepath.Base(d) + "/s" }, "clean"},
		{"too long", func(_ *testing.T, d string) string { return d + "/" + strings.Repeat("a", 107) }, "Linux allows 107"},
		{"no folder", func(_ *testing.T, d string) string { return d + "/a/b/s" }, "no such file"},
		{"symlink in its place", func(t *testing.T, d string) string {
			link(t, d+"/elsewhere", d+"/s")
			return d + "/s"
		}, "symbolic link"},
		{"dangling symlink in its place", func(t *testing.T, d string) string {
			link(t, "/nowhere", d+"/s")
			return d + "/s"
		}, "symbolic link"},
		{"symlink as folder", func(t *testing.T, d string) string {
			mkdir(t, d+"/real", 0o700)
			link(t, d+"/real", d+"/l")
			return d + "/l/s"
		}, "use "},
		{"folder of another user", func(t *testing.T, d string) string {
			mkdir(t, d+"/f", 0o700)
			if err := os.Chown(d+"/f", 65534, 65534); err != nil {
				t.Fatal(err)
			}
			return d + "/f/s"
		}, "uid 65534"},
		{"folder that others may write", func(t *testing.T, d string) string {
			mkdir(t, d+"/f", 0o777)
			return d + "/f/s"
		}, "others may write"},
		{"sticky folder that others may write", func(t *testing.T, d string) string {
			mkdir(t, d+"/f", 0o777|os.ModeSticky)
			return d + "/f/s"
		}, "others may write"},
		{"folder above that others may write", func(t *testing.T, d string) string {
			mkdir(t, d+"/f", 0o777)
			mkdir(t, d+"/f/g", 0o700)
			return d + "/f/g/s"
		}, "others may write"},
		{"a file", func(t *testing.T, d string) string {
			if err := os.WriteFile(d+"/s", []byte("keep"), 0o600); err != nil {
				t.Fatal(err)
			}
			return d + "/s"
		}, "not a socket"},
		{"a daemon that lives", func(t *testing.T, d string) string {
			l, err := net.Listen("unix", d+"/s")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			return d + "/s"
		}, "only one mknetd may run"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := c.make(t, t.TempDir())
			before, _ := os.Lstat(path)
			_, err := listen(t, path, -1)
			var se *api.SocketError
			if !errors.As(err, &se) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if after, _ := os.Lstat(path); before != nil && (after == nil || !os.SameFile(before, after)) {
				t.Error("what was there has been touched")
			}
		})
	}
}

func link(t *testing.T, to, from string) {
	t.Helper()
	if err := os.Symlink(to, from); err != nil {
		t.Fatal(err)
	}
}

func mkdir(t *testing.T, dir string, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, mode)); err != nil {
		t.Fatal(err)
	}
}

// A socket that a killed daemon left is replaced; one that a later daemon made is
// not removed by the earlier one's end.
func TestStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := dead.Close(); err != nil {
		t.Fatal(err)
	}
	first, err := listen(t, path, -1)
	if err != nil {
		t.Fatalf("beside a stale socket: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(t, path, -1); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the later daemon's socket is gone: %v", err)
	}
}

// callAs is the argument that makes this test binary a caller: it asks for the
// daemon's health and prints the answer.
const callAs = "call-as"

func callAsMain(socket string) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		_, _ = io.WriteString(os.Stdout, err.Error())
		return
	}
	_, _ = io.WriteString(conn, "GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	_, _ = io.Copy(os.Stdout, conn)
}

// Who may call, asked by processes of other users. The socket's mode is opened
// up, so that only the check of the peer is in the way.
func TestPeers(t *testing.T) {
	const gid = 4242
	base, err := os.MkdirTemp("/run", "peers-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	if err := os.Chmod(base, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		group  int // SocketGID
		mode   os.FileMode
		caller syscall.Credential
		want   string
	}{
		{"root", -1, 0o600, syscall.Credential{}, "200 OK"},
		{"nobody, as it is made", -1, 0o600, syscall.Credential{Uid: 65534, Gid: 65534}, "permission denied"},
		{"nobody, with an open mode", -1, 0o666, syscall.Credential{Uid: 65534, Gid: 65534}, "403 Forbidden"},
		{"nobody, with root's group", -1, 0o666, syscall.Credential{Uid: 65534, Gid: 0}, "403 Forbidden"},
		{"a member", gid, 0o660, syscall.Credential{Uid: 65534, Gid: gid}, "200 OK"},
		{"a member by its other groups", gid, 0o660, syscall.Credential{Uid: 65534, Gid: 65534, Groups: []uint32{7, gid}}, "200 OK"},
		{"no member, with an open mode", gid, 0o666, syscall.Credential{Uid: 65534, Gid: 65534, Groups: []uint32{gid + 1}}, "403 Forbidden"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t, &fake{}, func(cfg *api.Config) {
				cfg.SocketGID = c.group
				cfg.Socket = filepath.Join(base, "s")
			})
			if err := os.Chmod(s.socket, c.mode); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, "/proc/self/exe", callAs, s.socket)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &c.caller}
			var out bytes.Buffer
			cmd.Stdout = &out
			if err := cmd.Run(); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out.String(), c.want) {
				t.Errorf("got %q, want %q", out.String(), c.want)
			}
			if refused := strings.Contains(s.log.String(), "caller refused"); refused != strings.Contains(c.want, "403") {
				t.Errorf("log: %s", s.log)
			}
		})
	}
}

func TestUnreachable(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	hung, err := net.Listen("unix", filepath.Join(dir, "hung"))
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	mute, err := net.Listen("unix", filepath.Join(dir, "mute"))
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	go func() {
		for {
			c, err := mute.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, socket string
		want         client.Reason
	}{
		{"missing", "missing", client.NotThere},
		{"missing folder", "a/b", client.NotThere},
		{"nobody listens", "stale", client.Refused},
		{"a file", "file", client.Refused},
		{"never answers", "hung", client.TimedOut},
		{"hangs up", "mute", client.Broken},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl, err := client.New("unix://" + filepath.Join(dir, c.socket))
			if err != nil {
				t.Fatal(err)
			}
			defer cl.Close()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			if c.want == client.TimedOut {
				ctx, cancel = context.WithTimeout(context.Background(), 100*time.Millisecond)
			}
			defer cancel()
			_, err = cl.Health(ctx)
			var u *client.UnreachableError
			if !errors.Is(err, client.ErrUnreachable) || !errors.As(err, &u) || u.Reason != c.want {
				t.Errorf("got %v, want %q", err, c.want)
			}
			_, _, err = cl.Attach(ctx, sampleGen, attachRequest(1))
			if !errors.Is(err, client.ErrUnreachable) || !errors.As(err, &u) || u.Reason != c.want {
				t.Errorf("attach: got %v, want %q", err, c.want)
			}
		})
	}
}
