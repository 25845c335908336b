package session

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"mknet/spec/pump"
)

// TokenFileError says why a token file is not acceptable. It never holds what
// the file does.
type TokenFileError struct {
	Path   string
	Reason string
}

func (e *TokenFileError) Error() string { return fmt.Sprintf("token file %s: %s", e.Path, e.Reason) }

// LoadToken reads a token file: a regular file, not a symbolic link, mode 0400
// or 0600, owned by root, with 32 raw bytes or 64 hexadecimal digits. An absent
// file is fs.ErrNotExist; everything else that is wrong with it a
// *TokenFileError.
func LoadToken(path string) (pump.Token, error) {
	// O_NONBLOCK: opening a FIFO must not wait for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, syscall.ELOOP) {
			return pump.Token{}, &TokenFileError{path, "is a symbolic link"}
		}
		return pump.Token{}, fmt.Errorf("token file: %w", err)
	}
	defer func() { _ = f.Close() }() // read only: nothing is lost
	info, err := f.Stat()
	if err != nil {
		return pump.Token{}, fmt.Errorf("token file: %w", err)
	}
	if err := checkTokenFile(path, info); err != nil {
		return pump.Token{}, err
	}
	b, err := io.ReadAll(io.LimitReader(f, 2*pump.TokenBytes+2))
	if err != nil {
		return pump.Token{}, fmt.Errorf("token file: %w", err)
	}
	t, err := pump.ParseToken(b)
	if err != nil {
		return pump.Token{}, &TokenFileError{path, err.Error()}
	}
	return t, nil
}

func checkTokenFile(path string, info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	switch perm := info.Mode().Perm(); {
	case !info.Mode().IsRegular():
		return &TokenFileError{path, "is not a regular file"}
	case perm != 0o400 && perm != 0o600 || info.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky) != 0:
		return &TokenFileError{path, fmt.Sprintf("has mode %04o, must have 0400 or 0600", perm)}
	case !ok || st.Uid != 0:
		return &TokenFileError{path, "is not owned by root"}
	}
	return nil
}

// NewToken returns a fresh random token.
func NewToken() pump.Token {
	var t pump.Token
	// crypto/rand.Read never fails since Go 1.24: it ends the process instead.
	_, _ = rand.Read(t[:])
	return t
}

// CreateTokenFile writes t to a new file of mode 0400. A file that is there is
// left alone: fs.ErrExist.
func CreateTokenFile(path string, t pump.Token) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return fmt.Errorf("token file: %w", err)
	}
	if err := writeAndSync(f, t); err != nil {
		return errors.Join(fmt.Errorf("token file %s: %w", path, err), os.Remove(path))
	}
	return syncDir(filepath.Dir(path))
}

// ReplaceTokenFile puts t in the place of path in one step, mode 0600.
func ReplaceTokenFile(path string, t pump.Token) error {
	// CreateTemp makes the file 0600 with O_EXCL.
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("token file: %w", err)
	}
	if err := writeAndSync(f, t); err != nil {
		return errors.Join(fmt.Errorf("token file %s: %w", path, err), os.Remove(f.Name()))
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return errors.Join(fmt.Errorf("token file: %w", err), os.Remove(f.Name()))
	}
	return syncDir(filepath.Dir(path))
}

func writeAndSync(f *os.File, t pump.Token) error {
	_, err := f.Write(t[:])
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("token folder: %w", err)
	}
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP) {
		err = nil // a file system without anything to sync: ramfs in an initramfs
	}
	return errors.Join(err, d.Close())
}
