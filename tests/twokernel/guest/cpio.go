package guest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path"
)

// Archive writes an initramfs: a cpio archive in the "newc" format
// (Documentation/driver-api/early-userspace/buffer-format.rst). Several of them,
// one behind the other in one file, are unpacked over each other. The first error
// is kept and returned by Close.
type Archive struct {
	w    *bufio.Writer
	size int64
	ino  int
	dirs map[string]bool
	err  error
}

// Modes of cpio entries: file type and permissions.
const (
	cpioDir  = 0o040755
	cpioFile = 0o100000
	cpioLink = 0o120777
)

// NewArchive begins an archive. w stays the caller's.
func NewArchive(w io.Writer) *Archive {
	return &Archive{w: bufio.NewWriter(w), dirs: map[string]bool{"/": true, ".": true}}
}

// Bytes adds a file. Its folders are made.
func (a *Archive) Bytes(name string, perm os.FileMode, data []byte) {
	a.Dir(path.Dir(name))
	a.entry(name, cpioFile|uint32(perm.Perm()), data)
}

// File adds a copy of a file, symbolic links followed.
func (a *Archive) File(name, source string) {
	if a.err != nil {
		return
	}
	info, err := os.Stat(source)
	if err != nil {
		a.err = err
		return
	}
	data, err := os.ReadFile(source)
	if err != nil {
		a.err = err
		return
	}
	a.Bytes(name, info.Mode(), data)
}

// Link adds a symbolic link.
func (a *Archive) Link(name, target string) {
	a.Dir(path.Dir(name))
	a.entry(name, cpioLink, []byte(target))
}

// Dir adds a folder and those above it, once.
func (a *Archive) Dir(name string) {
	if name = path.Clean(name); a.dirs[name] {
		return
	}
	a.dirs[name] = true
	a.Dir(path.Dir(name))
	a.entry(name, cpioDir, nil)
}

// Close ends the archive.
func (a *Archive) Close() error {
	a.entry("TRAILER!!!", 0, nil)
	if a.err != nil {
		return fmt.Errorf("write initramfs: %w", a.err)
	}
	return a.w.Flush()
}

func (a *Archive) entry(name string, mode uint32, data []byte) {
	for len(name) > 1 && name[0] == '/' {
		name = name[1:]
	}
	a.ino++
	// magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor,
	// rdevmajor, rdevminor, namesize, check
	a.write(fmt.Appendf(nil, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0))
	a.write(append([]byte(name), 0))
	a.pad()
	a.write(data)
	a.pad()
}

func (a *Archive) write(b []byte) {
	if a.err == nil {
		_, a.err = a.w.Write(b)
		a.size += int64(len(b))
	}
}

// pad fills up to a multiple of 4 bytes.
func (a *Archive) pad() { a.write(make([]byte, -a.size&3)) }
