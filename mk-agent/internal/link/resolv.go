package link

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// ResolvConf is the text of resolv.conf(5) for d.
func ResolvConf(d endpoint.DNS) []byte {
	var b strings.Builder
	b.WriteString("# written by mk-agent\n")
	line := func(key string, words ...string) {
		if len(words) > 0 && words[0] != "" {
			fmt.Fprintf(&b, "%s %s\n", key, strings.Join(words, " "))
		}
	}
	// Of domain and search the last one wins: search is the more precise.
	line("domain", d.Domain)
	line("search", d.Search...)
	for _, s := range d.Nameservers {
		line("nameserver", s)
	}
	line("options", d.Options...)
	return []byte(b.String())
}

// EnsureResolvConf makes the file at path what d says and reports whether that
// was a change. An empty d changes nothing. Readers see the old text or the new
// one, never half of it, unless the file is a mount of its own: such a file can
// only be written in place. A symbolic link is replaced by the file.
func EnsureResolvConf(path string, d endpoint.DNS) (changed bool, err error) {
	if d.IsZero() {
		return false, nil
	}
	text := ResolvConf(d)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, fmt.Errorf("resolver: %w", err)
	}
	err = replaceFile(path, text)
	// EBUSY: path is a mount point (rename(2)). The others: only the file itself
	// may be written, not its folder.
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EXDEV) {
		err = writeInPlace(path, text)
	}
	if err != nil {
		return false, fmt.Errorf("resolver: %w", err)
	}
	return true, nil
}

func replaceFile(path string, text []byte) error {
	// One name, so that a killed agent leaves at most one file.
	temp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".mk-agent")
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(0o644) // whatever the umask is: every program of the child reads it
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return nil
}

// writeInPlace overwrites before it cuts, so that a short text never leaves the
// file empty in between.
func writeInPlace(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Truncate(int64(len(text)))
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
