package delqueue

import (
	"path/filepath"
	"strings"
)

const unixScheme = "unix://"

// Daemon names the mknetd at address ("unix:///run/mknetd.sock") as entries do: a
// socket by the path of its folder with symbolic links followed, as far as that
// exists now. While mknetd is away its folder may be missing too, so that both sides
// of a comparison have to be named anew.
func Daemon(address string) string {
	socket, ok := strings.CutPrefix(address, unixScheme)
	if !ok || !filepath.IsAbs(socket) {
		return address
	}
	dir, missing := filepath.Split(filepath.Clean(socket))
	for {
		dir = filepath.Clean(dir)
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			return unixScheme + filepath.Join(real, missing)
		}
		if dir == "/" {
			return address
		}
		missing = filepath.Join(filepath.Base(dir), missing)
		dir = filepath.Dir(dir)
	}
}

// MeantFor reports whether the entry's DEL is for the mknetd at address.
func (e Entry) MeantFor(address string) bool {
	return e.Daemon == address || Daemon(e.Daemon) == Daemon(address)
}
