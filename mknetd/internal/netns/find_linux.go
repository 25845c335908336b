package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// Find opens the namespace that a record describes, after a restart of the
// daemon. It looks at the recorded path, then at every namespace that is mounted
// anywhere in the daemon's mount namespace, then at those of all processes; the
// recorded inode narrows the search and the cookie decides. ErrGone means that
// nothing leads there, or that the host has been rebooted since.
func Find(ctx context.Context, want endpoint.Namespace) (*Namespace, error) {
	boot, err := BootID()
	if err != nil {
		return nil, err
	}
	if want.BootID != boot {
		return nil, fmt.Errorf("namespace %s of an earlier boot: %w", want.Path, ErrGone)
	}
	if n, err := match(want.Path, want); n != nil || err != nil {
		return n, err
	}
	mounted, err := mountedAt(want.Inode)
	if err != nil {
		return nil, err
	}
	for _, path := range mounted {
		if n, err := match(path, want); n != nil || err != nil {
			return n, err
		}
	}
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, p := range processes {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if p.Name()[0] < '0' || p.Name()[0] > '9' {
			continue
		}
		path := "/proc/" + p.Name() + "/ns/net"
		var st unix.Stat_t
		if unix.Stat(path, &st) != nil || st.Ino != want.Inode || st.Dev != want.Device {
			continue // another namespace, or the process has just ended
		}
		if n, err := match(path, want); n != nil || err != nil {
			return n, err
		}
	}
	return nil, fmt.Errorf("namespace %s (net:[%d]): %w", want.Path, want.Inode, ErrGone)
}

// match opens path if it is the wanted namespace; nil without an error means
// that it is something else by now, or nothing.
func match(path string, want endpoint.Namespace) (*Namespace, error) {
	if path == "" {
		return nil, nil
	}
	n, err := Open(path)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, ErrNotNamespace), errors.Is(err, ErrHostNamespace),
		errors.Is(err, unix.ESRCH): // the process behind the path has ended
		return nil, nil
	case err != nil:
		return nil, err
	}
	if !n.id.Same(want) {
		return nil, n.Close()
	}
	n.id.Owned = want.Owned
	return n, nil
}

// mountedAt returns where the namespace with this inode is bind-mounted. The
// root field of such a mount is "net:[INODE]" (proc_pid_mountinfo(5)).
func mountedAt(inode uint64) ([]string, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	root := fmt.Sprintf("net:[%d]", inode)
	var paths []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 4 && fields[3] == root {
			paths = append(paths, unescape(fields[4]))
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return paths, nil
}

// unescape undoes mangle_path (fs/seq_file.c): \040 and the like stand for white
// space and the backslash.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
