package session

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTokenFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "token")
	want := NewToken()
	if err := CreateTokenFile(path, want); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o400 || info.Size() != 32 {
		t.Errorf("file is %v, %v", info, err)
	}
	if got, err := LoadToken(path); err != nil || got != want {
		t.Errorf("LoadToken: %v", err)
	}
	if err := CreateTokenFile(path, NewToken()); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second CreateTokenFile: got %v, want fs.ErrExist", err)
	}
	if got, err := LoadToken(path); err != nil || got != want {
		t.Errorf("the refused CreateTokenFile changed the file: %v", err)
	}
	next := NewToken()
	if err := ReplaceTokenFile(path, next); err != nil {
		t.Fatal(err)
	}
	if got, err := LoadToken(path); err != nil || got != next {
		t.Errorf("after ReplaceTokenFile: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("replaced file is %v, %v", info, err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
		t.Errorf("left over: %v, %v", names, err)
	}
	if _, err := LoadToken(filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: got %v, want fs.ErrNotExist", err)
	}
}

func TestLoadTokenRefuses(t *testing.T) {
	good := bytes.Repeat([]byte{0x61}, 32)
	file := func(content []byte, mode os.FileMode) func(string) error {
		return func(p string) error {
			return errors.Join(os.WriteFile(p, content, 0o600), os.Chmod(p, mode))
		}
	}
	for _, tt := range []struct {
		name string
		make func(path string) error
		want string
	}{
		{"empty", file(nil, 0o400), "0 bytes"},
		{"short", file(good[:31], 0o400), "31 bytes"},
		{"long", file(bytes.Repeat(good, 40), 0o400), "bytes"},
		{"group may read", file(good, 0o440), "mode 0440"},
		{"world may read", file(good, 0o644), "mode 0644"},
		{"executable", file(good, 0o700), "mode 0700"},
		{"setuid", file(good, 0o400|os.ModeSetuid), "mode"},
		{"other owner", func(p string) error { return errors.Join(os.WriteFile(p, good, 0o400), os.Chown(p, 12345, 0)) }, "not owned by root"},
		{"symbolic link", func(p string) error {
			return errors.Join(os.WriteFile(p+".real", good, 0o400), os.Symlink(p+".real", p))
		}, "symbolic link"},
		{"folder", func(p string) error { return os.Mkdir(p, 0o700) }, "not a regular file"},
		{"FIFO", func(p string) error { return unix.Mkfifo(p, 0o400) }, "not a regular file"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "token")
			if err := tt.make(path); err != nil {
				t.Fatal(err)
			}
			_, err := LoadToken(path)
			var bad *TokenFileError
			if !errors.As(err, &bad) || !strings.Contains(bad.Reason, tt.want) {
				t.Errorf("got %v, want a *TokenFileError with %q", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), "aaaa") {
				t.Errorf("the error shows the content: %v", err)
			}
		})
	}
}
