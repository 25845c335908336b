package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
)

// Errors that a caller branches on.
var (
	// ErrIncompatible is returned by Open when a pinned map has another layout
	// than this program's: another version made it. Drain the node's endpoints
	// and Purge, or run that version.
	ErrIncompatible = errors.New("pinned map has another layout")
	// ErrNoEndpoint is returned by Counters for an address without endpoint.
	ErrNoEndpoint = errors.New("no endpoint has this address")
	// ErrShadowed is returned by Ensure when a foreign filter stands before ours
	// at a place that we cannot take: remove it, or give it another priority.
	ErrShadowed = errors.New("a foreign filter stands before ours")
)

// Way is how programs are attached to a link.
type Way string

// The ways.
const (
	Auto   Way = ""       // TCX where the kernel has it (6.6), else Clsact
	TCX    Way = "tcx"    // a BPF link on the device, pinned
	Clsact Way = "clsact" // a cls_bpf filter of the device's clsact qdisc
)

// Config says where things are pinned and what the kernel is asked for. The zero
// value is the default. Attach may change only after Purge.
type Config struct {
	Dir       string       // folder of the pins in a bpffs; empty: DefaultDir
	Log       *slog.Logger // nil: nothing is logged
	Attach    Way
	NoPeer    bool   // bpf_redirect even where the kernel has bpf_redirect_peer
	PassOther bool   // let pods send and get frames that are neither IPv4 nor ARP, or tagged
	Flows     uint32 // entries of map policy_conntrack where it is made; 0: DefaultFlows
}

// Datapath is the loaded data path. Its methods may be called concurrently;
// those that change one endpoint's objects are serialised by the caller, as the
// engine does.
type Datapath struct {
	cfg     Config
	objects programObjects
	names   map[string]*ebpf.Program // by name in bpf/datapath.c
	links   *netlink.Handle

	mu   sync.Mutex
	ours map[ebpf.ProgramID]string // programs known to be this version's, by name; see current

	pinsMu sync.Mutex // of links: whose a pin is, and its removal, are one step

	countsMu sync.Mutex // also held while all counts are read
	gone     Counters   // of endpoints that this process has removed

	traces tracer

	shaped     map[int]bool                    // links that a queueing discipline shapes, see shaping.go
	listQdiscs func() ([]netlink.Qdisc, error) // those of all links; tests have it fail
}

// Open loads the programs, takes or makes the pinned maps, and replaces the
// programs that an earlier process attached. The caller closes the result.
func Open(cfg Config) (*Datapath, error) {
	if cfg.Dir == "" {
		cfg.Dir = DefaultDir
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	d := &Datapath{cfg: cfg, ours: map[ebpf.ProgramID]string{}}
	if err := d.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("data path: %w", err), d.Close())
	}
	return d, nil
}

func (d *Datapath) open() error {
	if err := ensureDir(d.cfg.Dir); err != nil {
		return err
	}
	if err := sweep(d.cfg.Dir); err != nil {
		return err
	}
	if err := d.choose(); err != nil {
		return err
	}
	var err error
	if d.links, err = netns.NewHandle(); err != nil {
		return err
	}
	d.listQdiscs = func() ([]netlink.Qdisc, error) { return d.links.QdiscList(nil) }
	if d.shaped, err = d.readShaped(); err != nil {
		return err
	}
	if err := d.load(&d.objects); err != nil {
		return err
	}
	if err := d.forgetTraces(); err != nil {
		return err
	}
	d.names = byName(&d.objects.programPrograms)
	for name, p := range d.names {
		if err := repin(p, filepath.Join(d.cfg.Dir, programsDir, name)); err != nil {
			return err
		}
	}
	// What is dropped on a link without endpoint is counted here.
	if err := d.objects.Counts.Update(address{}, make([]countersValue, ebpf.MustPossibleCPU()), ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("map counts: %w", err)
	}
	return d.upgrade()
}

// choose settles what the kernel can do.
func (d *Datapath) choose() error {
	switch d.cfg.Attach {
	case TCX, Clsact:
	case Auto:
		_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
		switch {
		case err == nil:
			d.cfg.Attach = TCX
		case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.EINVAL): // EINVAL: kernels before 6.6
			d.cfg.Attach = Clsact
		default:
			return fmt.Errorf("ask for TCX: %w", err)
		}
	default:
		return fmt.Errorf("attach %q: must be %q, %q or empty", d.cfg.Attach, TCX, Clsact)
	}
	if !d.cfg.NoPeer {
		switch err := features.HaveProgramHelper(ebpf.SchedCLS, asm.FnRedirectPeer); {
		case errors.Is(err, ebpf.ErrNotSupported):
			d.cfg.NoPeer = true
		case err != nil:
			return fmt.Errorf("ask for bpf_redirect_peer: %w", err)
		}
	}
	return nil
}

// loopback is the index of lo in every network namespace (net/core/dev.c:
// LOOPBACK_IFINDEX).
const loopback = 1

// Way reports how programs are attached here: TCX or Clsact.
func (d *Datapath) Way() Way { return d.cfg.Attach }

// load fills o with fresh programs on the pinned maps.
func (d *Datapath) load(o any) error {
	spec, err := loadProgram()
	if err != nil {
		return fmt.Errorf("read the objects: %w", err)
	}
	if err := spec.Variables["use_peer"].Set(b2u(!d.cfg.NoPeer)); err != nil {
		return fmt.Errorf("constant use_peer: %w", err)
	}
	maps := map[string]*ebpf.Map{}
	defer func() {
		for _, m := range maps {
			m.Close()
		}
	}()
	for name, s := range spec.Maps {
		if s.Type == ebpf.Array && name[0] == '.' {
			continue // constants, of each load its own
		}
		if name == "policy_conntrack" && d.cfg.Flows != 0 {
			s.MaxEntries = d.cfg.Flows
		}
		if maps[name], err = d.takeMap(s); err != nil {
			return err
		}
		s.MaxEntries = maps[name].MaxEntries()
	}
	if err := spec.LoadAndAssign(o, &ebpf.CollectionOptions{MapReplacements: maps}); err != nil {
		return fmt.Errorf("load the programs: %w", err)
	}
	return nil
}

// takeMap opens the pinned map of the spec's name, or makes and pins it. The size
// of a map that is there stays.
func (d *Datapath) takeMap(s *ebpf.MapSpec) (*ebpf.Map, error) {
	path := filepath.Join(d.cfg.Dir, mapsDir, s.Name)
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		if m, err = ebpf.NewMap(s); err != nil {
			return nil, fmt.Errorf("make map %s: %w", s.Name, err)
		}
		if err := m.Pin(path); err != nil {
			m.Close()
			return nil, fmt.Errorf("pin map %s: %w", s.Name, err)
		}
		return m, nil
	}
	if err != nil {
		return nil, fmt.Errorf("take map %s: %w", path, err)
	}
	if m.Type() != s.Type || m.KeySize() != s.KeySize || m.ValueSize() != s.ValueSize || m.Flags() != s.Flags {
		err = fmt.Errorf("%w: %s is %s with keys of %d and values of %d bytes, this version has %s with %d and %d (remove all endpoints, then the pins)",
			ErrIncompatible, path, m.Type(), m.KeySize(), m.ValueSize(), s.Type, s.KeySize, s.ValueSize)
	} else if s.InnerMap != nil {
		err = takesInner(m, s.InnerMap, path)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// takesInner reports whether the map of maps takes such inner maps: the kernel does
// not tell what it was made for, it refuses (kernel/bpf/map_in_map.c:
// bpf_map_meta_equal). The key 0 is no generation.
func takesInner(outer *ebpf.Map, s *ebpf.MapSpec, path string) error {
	inner, err := ebpf.NewMap(s)
	if err != nil {
		return fmt.Errorf("make an inner map for %s: %w", path, err)
	}
	defer inner.Close()
	const none = uint32(0)
	err = outer.Put(none, inner)
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %s takes no inner maps with values of %d bytes, as this version has them (remove all endpoints, then the pins)", ErrIncompatible, path, s.ValueSize)
	}
	if err != nil {
		return fmt.Errorf("try an inner map in %s: %w", path, err)
	}
	if err := outer.Delete(none); err != nil {
		return fmt.Errorf("take an inner map out of %s: %w", path, err)
	}
	return nil
}

// Close lets go of everything; what is pinned stays and works on.
func (d *Datapath) Close() error {
	if d.links != nil {
		d.links.Close()
	}
	if d.objects.FromContainer == nil {
		return nil
	}
	if err := errors.Join(d.endTraces(), d.objects.Close()); err != nil {
		return fmt.Errorf("close the data path: %w", err)
	}
	return nil
}

func byName(p *programPrograms) map[string]*ebpf.Program {
	return map[string]*ebpf.Program{
		"from_container": p.FromContainer,
		"to_container":   p.ToContainer,
		"from_child":     p.FromChild,
		"to_child":       p.ToChild,
	}
}

func b2u(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}
