package datapath

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// VerifierLimit is the number of instructions that the kernel's verifier follows
// in one program before it gives up (include/linux/bpf.h:
// BPF_COMPLEXITY_LIMIT_INSNS).
const VerifierLimit = 1_000_000

// VerifierCost is what one program cost the verifier when it was loaded here.
type VerifierCost struct {
	Program      string
	Instructions uint32 // followed, over all paths; of at most VerifierLimit
}

// Percent is the part of VerifierLimit.
func (c VerifierCost) Percent() float64 { return float64(c.Instructions) * 100 / VerifierLimit }

func (c VerifierCost) String() string {
	return fmt.Sprintf("%s: %d of %d instructions (%.2f %%)", c.Program, c.Instructions, VerifierLimit, c.Percent())
}

// ErrNoCost is returned by VerifierCosts on a kernel that does not tell (before 5.16).
var ErrNoCost = errors.New("the kernel does not tell what a program cost its verifier")

// MeasureVerifier loads the programs on small maps of their own, for their costs,
// and lets go of both.
func MeasureVerifier() ([]VerifierCost, error) {
	spec, err := loadProgram()
	if err != nil {
		return nil, fmt.Errorf("read the objects: %w", err)
	}
	for _, m := range spec.Maps {
		if m.Type != ebpf.RingBuf { // whose size is one of pages
			m.MaxEntries = min(m.MaxEntries, 1024)
		}
	}
	var p programPrograms
	if err := spec.LoadAndAssign(&p, nil); err != nil {
		return nil, fmt.Errorf("load the programs: %w", err)
	}
	list, err := verifierCosts(byName(&p))
	if closing := p.Close(); err == nil {
		err = closing
	}
	return list, err
}

// VerifierCosts lists what the loaded programs cost, sorted by name.
func (d *Datapath) VerifierCosts() ([]VerifierCost, error) { return verifierCosts(d.names) }

func verifierCosts(programs map[string]*ebpf.Program) ([]VerifierCost, error) {
	var list []VerifierCost
	for name, p := range programs {
		info, err := p.Info()
		if err != nil {
			return nil, fmt.Errorf("program %s: %w", name, err)
		}
		n, ok := info.VerifiedInstructions()
		if !ok {
			return nil, ErrNoCost
		}
		list = append(list, VerifierCost{name, n})
	}
	slices.SortFunc(list, func(a, b VerifierCost) int { return strings.Compare(a.Program, b.Program) })
	return list, nil
}
