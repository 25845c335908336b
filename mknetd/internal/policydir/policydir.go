// Package policydir reads policy documents from a folder and notices when it
// changes. The folder is one set: where one file is wrong, none of it is taken.
package policydir

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/policy"
)

// Limits of a folder.
const (
	MaxFiles = 1024
	MaxBytes = 16 << 20 // of all files
)

// FileError is what is wrong with one file.
type FileError struct {
	Path string
	Err  error // a *policy.Error where the documents are at fault
}

func (e *FileError) Error() string { return e.Path + ": " + e.Err.Error() }
func (e *FileError) Unwrap() error { return e.Err }

// Read returns the documents of all files that end in .yaml, .yml or .json and do
// not begin with a dot, in the order of their names. Every
// faulty file is in the error, and then nothing is returned. A folder that does not
// exist is fs.ErrNotExist and not empty: a lost mount must not open every endpoint.
func Read(dir string) ([]policy.Object, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []policy.Object
	var faults []error
	from := map[policy.Key]string{}
	files, size := 0, 0
	for _, e := range entries {
		if !wanted(e.Name()) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if files++; files > MaxFiles {
			return nil, fmt.Errorf("%s: has more than %d files", dir, MaxFiles)
		}
		objects, n, err := readFile(path)
		if size += n; size > MaxBytes {
			return nil, fmt.Errorf("%s: its files have more than %d bytes", dir, MaxBytes)
		}
		if err != nil {
			faults = append(faults, &FileError{path, err})
		}
		for _, o := range objects {
			if other, ok := from[o.Key()]; ok {
				faults = append(faults, &FileError{path, fmt.Errorf("%s is also in %s", o.Key(), other)})
			}
			from[o.Key()] = path
		}
		out = append(out, objects...)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return out, nil
}

func wanted(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

// readFile reads one file that only its owner may write: who can write it rules
// over all endpoints.
func readFile(path string) ([]policy.Object, int, error) {
	// Without O_NONBLOCK a named pipe would wait for its writer.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, 0, err
	case !fi.Mode().IsRegular():
		return nil, 0, errors.New("is not an ordinary file")
	case fi.Mode().Perm()&0o022 != 0:
		return nil, 0, fmt.Errorf("has mode %#o: others may write to it (chmod go-w)", fi.Mode().Perm())
	}
	text, err := io.ReadAll(io.LimitReader(f, policy.MaxBytes+1))
	if err != nil {
		return nil, 0, err
	}
	objects, err := policy.Parse(text)
	return objects, len(text), err
}

// How long Watch waits before it calls f again after an error; it doubles.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// Watch calls f once, and again whenever the folder has changed, until ctx ends.
// It looks every interval: a folder that is missing, is replaced or lies on a
// network file system reports nothing by itself. A change is taken once it has been
// the same for one interval, so that a file is not read while it is written.
//
// After an error f is called again, retryFirst later and then less and less often,
// with again set while the folder is as it was: what stands against its documents
// may pass without a change of a file (no descriptor or no space left, a document
// of another source that is in the way).
func Watch(ctx context.Context, dir string, interval time.Duration, f func(again bool) error) {
	taken := stamp(dir)
	failed := f(false) != nil
	wait, tried := retryFirst, time.Now()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	seen := taken
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := stamp(dir)
		switch {
		case now != taken && now == seen:
			taken = now
			failed = f(false) != nil
			wait, tried = retryFirst, time.Now()
		case failed && now == taken && time.Since(tried) >= wait:
			failed = f(true) != nil
			wait, tried = min(2*wait, retryMost), time.Now()
		}
		seen = now
	}
}

// stamp changes when a file is written, replaced, added or removed.
func stamp(dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, e := range entries {
		if !wanted(e.Name()) {
			continue
		}
		var st unix.Stat_t
		err := unix.Stat(filepath.Join(dir, e.Name()), &st)
		fmt.Fprintln(&b, e.Name(), st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim, err)
	}
	return b.String()
}
