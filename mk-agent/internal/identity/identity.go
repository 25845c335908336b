// Package identity finds out which child this is and which token it holds: from
// two files, or from the kernel command line. It implements the agent's part of
// the trust section of spec/pump-protocol.md.
//
// Everything is read again for every peer, so that a restored snapshot or a clone
// can be given another identity while the agent runs.
package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"mknet/shim/session"
	"mknet/spec/endpoint"
)

// maxFileBytes bounds an identity file and a kernel command line
// (COMMAND_LINE_SIZE is at most 4096, asm-generic/setup.h and x86).
const maxFileBytes = 4096

// file is the identity file: one JSON object. It holds no secret.
type file struct {
	SandboxID         string              `json:"sandboxID"`
	SandboxGeneration string              `json:"sandboxGeneration"`
	Endpoint          endpoint.Generation `json:"endpointGeneration,omitzero"`
}

// FromFiles reads the identity from one file and the token from another, each
// time it is called.
func FromFiles(identityPath, tokenPath string) func() (session.Credentials, error) {
	return func() (session.Credentials, error) {
		id, err := readFile(identityPath)
		if err != nil {
			return session.Credentials{}, err
		}
		token, err := session.LoadToken(tokenPath)
		if err != nil {
			return session.Credentials{}, err
		}
		return session.Credentials{Identity: id, Token: token}, nil
	}
}

func readFile(path string) (session.Identity, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return session.Identity{}, fmt.Errorf("identity file: %w", err)
	}
	defer func() { _ = f.Close() }() // read only
	info, err := f.Stat()
	if err != nil {
		return session.Identity{}, fmt.Errorf("identity file: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return session.Identity{}, fmt.Errorf("identity file %s: is not a regular file", path)
	case info.Mode().Perm()&0o022 != 0 || !ok || st.Uid != 0:
		return session.Identity{}, fmt.Errorf("identity file %s: must be owned by root and writable by nobody else", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return session.Identity{}, fmt.Errorf("identity file: %w", err)
	}
	id, err := parseFile(b)
	if err != nil {
		return session.Identity{}, fmt.Errorf("identity file %s: %w", path, err)
	}
	return id, nil
}

func parseFile(b []byte) (session.Identity, error) {
	if len(b) > maxFileBytes {
		return session.Identity{}, fmt.Errorf("is longer than %d bytes", maxFileBytes)
	}
	var v file
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return session.Identity{}, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return session.Identity{}, errors.New("has something after the object")
	}
	id := session.Identity{Sandbox: endpoint.Sandbox{ID: v.SandboxID, Generation: v.SandboxGeneration}, Endpoint: v.Endpoint}
	return id, id.Sandbox.Validate()
}
