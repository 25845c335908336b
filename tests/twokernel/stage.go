package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"mknet/tests/twokernel/guest"
)

// Limits, for a machine that is four times slower than the one on which a guest
// boots in 15 s and a command in it takes half a second.
const (
	bootLimit    = 5 * time.Minute
	stepLimit    = 2 * time.Minute
	linkLimit    = 2 * time.Minute // from a program's start to the first packet
	payloadLimit = 5 * time.Minute // 16 MiB
)

// CIDs of the guests, and where the agent listens.
const (
	primaryCID = 3
	childCID   = 42
	agentPort  = 1023
	sandboxID  = "sandbox-1"
)

// stage is one part's cast.
type stage struct {
	*show
	built
	ctx  context.Context //nolint:containedctx // the run's, for every boot
	dir  string
	name string // of the part

	primary    machine
	bin        string // of mknet's programs in the primary
	cnitool    string
	inguest    string // in the primary
	agentURL   string // what the shim dials
	flows      func() int
	child      *child
	bootChild  func(generation string) (*child, error)
	killChild  func() error
	onClose    []func()
	addr, gw   string // from the ADD result
	generation string // of the endpoint
}

// child is where mk-agent runs.
type child struct {
	machine
	in         string // what runs a command in the child's network
	agent      []string
	identity   string // path there
	token      string
	resolvConf string
	generation string // of the sandbox
	inguest    string // there
	key        []byte // the token, for the primary's copy
}

// close ends the part, the last begun first.
func (s *stage) close() {
	for i := len(s.onClose) - 1; i >= 0; i-- {
		s.onClose[i]()
	}
	s.onClose = nil
}

func (s *stage) later(f func()) { s.onClose = append(s.onClose, f) }

// switchLog is where a switch says what it does.
func (s *stage) switchLog() (*slog.Logger, error) {
	f, err := os.Create(s.dir + "/" + s.name + "-switch.log")
	if err != nil {
		return nil, err
	}
	s.later(func() { f.Close() })
	return slog.New(slog.NewTextHandler(f, nil)), nil
}

// newToken is a token file's content.
func newToken() []byte {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return []byte(hex.EncodeToString(b) + "\n")
}

// identity is an identity file's content. The endpoint's generation is not known
// yet when the first child boots.
func (s *stage) identityFile(generation string) []byte {
	id := map[string]string{"sandboxID": sandboxID, "sandboxGeneration": generation}
	if s.generation != "" {
		id["endpointGeneration"] = s.generation
	}
	b, _ := json.Marshal(id) // strings only
	return b
}

// bootGuestChild boots a child kernel whose initramfs holds its identity and
// token, as a runtime would make it.
func (s *stage) bootGuestChild(generation, vsock string) (*child, *guest.Machine, error) {
	c := &child{
		identity: "/etc/mknet/identity.json", token: "/etc/mknet/token", resolvConf: "/etc/resolv.conf",
		inguest: "/init", generation: generation, key: newToken(),
	}
	image := s.dir + "/" + s.name + "-" + generation + ".img"
	if err := s.overlay(image, c); err != nil {
		return nil, nil, err
	}
	m, err := s.boot(guest.Config{
		Name: s.name + "-child", Dir: s.dir, Kernel: s.kernel, Initramfs: image, MemoryMiB: 256, VsockSocket: vsock,
	})
	if err != nil {
		return nil, nil, err
	}
	c.machine = m
	c.agent = []string{"/mknet/mk-agent", "run", "--listen", fmt.Sprintf("vsock://any:%d", agentPort), "--identity", c.identity, "--token", c.token}
	return c, m, nil
}

// boot starts a guest that dies when the run is interrupted. It may be called
// from several goroutines.
func (s *stage) boot(c guest.Config) (*guest.Machine, error) {
	ctx, cancel := context.WithTimeout(s.ctx, bootLimit)
	defer cancel()
	m, err := guest.Boot(ctx, c)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(s.ctx, m.Kill)
	if err := checkClock(m); err != nil {
		m.Kill()
		return nil, err
	}
	return m, nil
}

// checkClock finds a guest whose clock is too fast, because it was calibrated
// while this machine was busy: every limit inside would be too short. A slow one
// cannot be told from a busy machine.
func checkClock(m *guest.Machine) error {
	const nap = 3 * time.Second
	begin := time.Now()
	if _, _, err := m.Run(fmt.Sprintf("sleep %.0f", nap.Seconds()), stepLimit); err != nil {
		return fmt.Errorf("guest %s: clock: %w", m.Name, err)
	}
	if took := time.Since(begin); took < nap*2/3 {
		return fmt.Errorf("guest %s: its clock is wrong: %s took %s (this machine is too busy; run it again)", m.Name, nap, took.Round(time.Millisecond))
	}
	return nil
}

// overlay writes the child's image with a second archive behind it.
func (s *stage) overlay(path string, c *child) error {
	base, err := os.ReadFile(s.built.child)
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(base); err != nil {
		return err
	}
	a := guest.NewArchive(f)
	a.Bytes(c.identity, 0o400, s.identityFile(c.generation))
	a.Bytes(c.token, 0o400, c.key)
	return errors.Join(a.Close(), f.Close())
}

// bootPrimary boots the primary as a guest.
func (s *stage) bootPrimary(vsock string) error {
	m, err := s.boot(guest.Config{
		Name: s.name + "-primary", Dir: s.dir, Kernel: s.kernel, Initramfs: s.built.primary, MemoryMiB: 512, VsockSocket: vsock,
	})
	if err != nil {
		return err
	}
	s.later(m.Kill)
	s.setPrimary(m, "/mknet", "/init")
	s.pass(fmt.Sprintf("the primary boots Linux %s", m.Release), m.BootTime)
	return nil
}

func (s *stage) setPrimary(m machine, bin, inguest string) {
	s.primary, s.bin, s.cnitool, s.inguest = m, bin, bin+"/cnitool", inguest
}

// logs prints what the programs said, for the one who has to find out why a step
// failed.
func (s *stage) logs() {
	for _, m := range []struct {
		name string
		machine
		programs []string
	}{
		{"primary", s.primary, []string{"mknetd", "shim-boot-1", "shim-boot-2", "internet"}},
		{"child", s.childMachine(), []string{"agent"}},
	} {
		if m.machine == nil {
			continue
		}
		for _, p := range m.programs {
			out, status, err := m.Run("tail -n 40 "+m.LogPath(p), stepLimit)
			if err == nil && status == 0 && strings.TrimSpace(out) != "" {
				fmt.Fprintf(s.out, "--- %s of the %s\n%s", p, m.name, out)
			}
		}
	}
}

func (s *stage) childMachine() machine {
	if s.child == nil || s.child.machine == s.primary {
		return nil
	}
	return s.child.machine
}
