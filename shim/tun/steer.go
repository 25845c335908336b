package tun

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"mknet/spec/pump"
)

// ErrNoSteering is returned where the kernel cannot steer packets to queues by a
// program (no TUNSETSTEERINGEBPF, no BPF, or not allowed): run one lane then.
var ErrNoSteering = errors.New("the kernel has no steering programs for TUN")

// A UDP flow becomes bulk with its first datagram of more than bulkUDPBytes (IP
// total length): DNS, NTP, games and the acknowledgements of QUIC stay below.
const (
	bulkUDPBytes = 600
	bulkFlows    = 4096 // remembered bulk UDP flows, least recently used go first
)

// Steer makes the device put bulk traffic (all TCP, UDP flows with large
// datagrams, fragments) into queue 0 and everything else into queue 1. A flow
// moves from latency to bulk at most once and never back, so that its packets do
// not overtake each other. With one queue open everything goes there.
//
// The program stays with the device until it is replaced or the device is gone.
func (q *Queue) Steer() error {
	flows, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "mknet_bulk", Type: ebpf.LRUHash, KeySize: 12, ValueSize: 4, MaxEntries: bulkFlows,
	})
	if err != nil {
		return fmt.Errorf("tun %s: steering: %w: map: %w", q.name, ErrNoSteering, err)
	}
	defer flows.Close() // the program holds it
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "mknet_steer", Type: ebpf.SocketFilter, License: "GPL", Instructions: steering(flows.FD()),
	})
	if err != nil {
		return fmt.Errorf("tun %s: steering: %w: program: %w", q.name, ErrNoSteering, err)
	}
	defer prog.Close() // the device holds it
	err = q.control("steering", func(fd int) error {
		return unix.IoctlSetPointerInt(fd, unix.TUNSETSTEERINGEBPF, prog.FD())
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTTY) {
		return fmt.Errorf("%w: %w", ErrNoSteering, err)
	}
	return err
}

// steering returns the program. Its context is a socket buffer whose data begins
// at the IP header; the return value is the index of the queue. Loads beyond the
// packet end the program with 0 (Documentation/bpf/classic_vs_extended.rst).
//
// The key of a flow is source, destination (RFC 791) and both ports (RFC 768).
// Packets with IP options are not worth the variable offset: bulk.
func steering(flows int) asm.Instructions {
	const keyAt, valueAt = -16, -4 // on the stack
	return asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1), // where LoadAbs expects the context

		asm.LoadAbs(0, asm.Byte),
		asm.JEq.Imm(asm.R0, 0x45, "ipv4"),
		asm.RSh.Imm(asm.R0, 4),
		asm.JEq.Imm(asm.R0, 4, "bulk"), // has options
		asm.Ja.Label("latency"),

		asm.LoadAbs(9, asm.Byte).WithSymbol("ipv4"),
		asm.JEq.Imm(asm.R0, unix.IPPROTO_TCP, "bulk"),
		asm.JNE.Imm(asm.R0, unix.IPPROTO_UDP, "latency"),
		asm.LoadAbs(6, asm.Half),
		asm.And.Imm(asm.R0, 0x3fff),
		asm.JNE.Imm(asm.R0, 0, "bulk"), // a fragment

		asm.LoadAbs(12, asm.Word),
		asm.StoreMem(asm.RFP, keyAt, asm.R0, asm.Word),
		asm.LoadAbs(16, asm.Word),
		asm.StoreMem(asm.RFP, keyAt+4, asm.R0, asm.Word),
		asm.LoadAbs(20, asm.Word),
		asm.StoreMem(asm.RFP, keyAt+8, asm.R0, asm.Word),
		asm.LoadAbs(2, asm.Half),
		asm.Mov.Reg(asm.R7, asm.R0), // IP total length

		asm.LoadMapPtr(asm.R1, flows),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, keyAt),
		asm.FnMapLookupElem.Call(),
		asm.JNE.Imm(asm.R0, 0, "bulk"),
		asm.JLE.Imm(asm.R7, bulkUDPBytes, "latency"),

		asm.StoreImm(asm.RFP, valueAt, 1, asm.Word),
		asm.LoadMapPtr(asm.R1, flows),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, keyAt),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, valueAt),
		asm.Mov.Imm(asm.R4, 0),     // BPF_ANY
		asm.FnMapUpdateElem.Call(), // a full map forgets its oldest flow
		asm.Ja.Label("bulk"),

		asm.Mov.Imm(asm.R0, pump.LaneBulk).WithSymbol("bulk"),
		asm.Return(),
		asm.Mov.Imm(asm.R0, pump.LaneLatency).WithSymbol("latency"),
		asm.Return(),
	}
}

// AttachLanes opens the queues that a pump with up to lanes lanes needs: two with
// steering, or a single one where two are not wanted or the kernel has no steering
// programs. vnet is as in Attach.
func AttachLanes(name string, lanes int, vnet bool) ([]*Queue, error) {
	queues, err := Attach(name, min(max(lanes, 1), MaxQueues), vnet)
	if err != nil || len(queues) == 1 {
		return queues, err
	}
	err = queues[0].Steer()
	if err == nil {
		return queues, nil
	}
	if err := errors.Join(err, CloseAll(queues)); !errors.Is(err, ErrNoSteering) {
		return nil, err
	}
	return Attach(name, 1, vnet)
}
