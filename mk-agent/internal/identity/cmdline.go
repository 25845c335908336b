package identity

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"mknet/shim/session"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// Keys of the kernel command line.
const (
	keySandbox    = "mknet.sandbox"    // sandbox ID
	keyGeneration = "mknet.generation" // sandbox generation
	keyEndpoint   = "mknet.endpoint"   // endpoint generation, 32 hex digits; optional
	keyToken      = "mknet.token"      // 64 hex digits, good for one session
	keyListen     = "mknet.listen"     // URL to listen on; optional
)

// Cmdline is what the kernel command line says. Every process of the child can
// read that, so its token is good for one session: the shim then sends the next
// one, which is kept in a folder that only root can read.
type Cmdline struct {
	Identity session.Identity
	Listen   string // empty: not given
	token    pump.Token
	stateDir string
}

// ReadCmdline reads the command line at path, usually /proc/cmdline. Later
// tokens are kept in stateDir, which must not outlive the child's boot.
func ReadCmdline(path, stateDir string) (*Cmdline, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("kernel command line: %w (mount /proc, or give an identity file)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("kernel command line: %w", err)
	}
	c, err := parseCmdline(string(b))
	if err != nil {
		return nil, fmt.Errorf("kernel command line: %w", err)
	}
	c.stateDir = stateDir
	return c, nil
}

// parseCmdline reads our keys up to a "--", behind which the arguments are
// init's. Errors never show a token.
func parseCmdline(s string) (*Cmdline, error) {
	if len(s) > maxFileBytes {
		return nil, fmt.Errorf("is longer than %d bytes", maxFileBytes)
	}
	values := map[string]string{}
	for _, word := range strings.Fields(s) {
		if word == "--" {
			break
		}
		key, value, _ := strings.Cut(word, "=")
		if !strings.HasPrefix(key, "mknet.") {
			continue
		}
		switch key {
		case keySandbox, keyGeneration, keyEndpoint, keyToken, keyListen:
		default:
			return nil, fmt.Errorf("unknown key %q", key)
		}
		if _, twice := values[key]; twice {
			return nil, fmt.Errorf("%s is given twice", key)
		}
		values[key] = strings.Trim(value, `"`)
	}
	c := &Cmdline{Listen: values[keyListen]}
	c.Identity.Sandbox = endpoint.Sandbox{ID: values[keySandbox], Generation: values[keyGeneration]}
	if err := c.Identity.Sandbox.Validate(); err != nil {
		return nil, fmt.Errorf("%s and %s: %w", keySandbox, keyGeneration, err)
	}
	if v := values[keyEndpoint]; v != "" {
		g, err := endpoint.ParseGeneration(v)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", keyEndpoint, err)
		}
		c.Identity.Endpoint = g
	}
	if len(values[keyToken]) != 2*pump.TokenBytes {
		return nil, fmt.Errorf("%s: must have %d hexadecimal digits", keyToken, 2*pump.TokenBytes)
	}
	var err error
	if c.token, err = pump.ParseToken([]byte(values[keyToken])); err != nil {
		return nil, fmt.Errorf("%s: %w", keyToken, err)
	}
	return c, nil
}

// Credentials returns the kept token where there is one, else that of the
// command line, which asks for the next.
func (c *Cmdline) Credentials() (session.Credentials, error) {
	creds := session.Credentials{Identity: c.Identity, Token: c.token, SingleUse: true}
	kept, err := session.LoadToken(c.keptPath())
	switch {
	case err == nil:
		creds.Token, creds.SingleUse = kept, false
	case !errors.Is(err, fs.ErrNotExist):
		// Falling back would make the used token good again.
		return session.Credentials{}, err
	}
	return creds, nil
}

// Keep stores the next token, mode 0600 in a folder of mode 0700.
func (c *Cmdline) Keep(t pump.Token) error {
	if err := os.MkdirAll(c.stateDir, 0o700); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	return session.ReplaceTokenFile(c.keptPath(), t)
}

// keptPath names the token by a hash of the one that it replaces, so that a file
// of an earlier boot is never taken for this one's.
func (c *Cmdline) keptPath() string {
	sum := sha256.Sum256(append([]byte("mknet kept token\x00"), c.token[:]...))
	return filepath.Join(c.stateDir, "token-"+hex.EncodeToString(sum[:8]))
}
