package explain_test

import (
	"encoding/binary"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"mknet/mknetd/internal/datapath"
)

// pins is the folder of the data path's pins: the private host has one daemon.
func pins(t *testing.T) string {
	t.Helper()
	found, err := filepath.Glob("/sys/fs/bpf/mknet-*")
	if err != nil || len(found) != 1 {
		t.Fatalf("folders of pins: %v, %v", found, err)
	}
	return found[0]
}

// inMap changes one map of the data path behind mknetd's back.
func inMap(t *testing.T, name string, change func(m *ebpf.Map) error) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(pins(t), "maps", name), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := change(m); err != nil {
		t.Fatalf("map %s: %v", name, err)
	}
}

// stranger is somebody else's program, which lets everything go on.
func stranger(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "stranger", Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func pinned(t *testing.T, v victim, hook string) link.Link {
	t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(pins(t), "links", v.HostLink+"-"+hook), nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// The hooks of a host link, by what passes them.
var hooks = []struct{ says, hook string }{{"from it", "ingress"}, {"to it", "egress"}}

// programsBroken are breakages of the programs of an endpoint that has some.
func programsBroken() (all []breakage) {
	for _, h := range hooks {
		object := func(v victim) string { return v.HostLink + "-" + h.hook }
		add := func(how string, unjudged bool, do func(t *testing.T, v victim)) {
			all = append(all, breakage{name: datapath.KindAttachment + " " + h.says + ", " + how, kind: datapath.KindAttachment, object: object, do: do, unjudged: unjudged})
		}
		add("detached", false, func(t *testing.T, v victim) {
			t.Helper()
			l := pinned(t, v, h.hook)
			defer l.Close()
			if err := l.Detach(); err != nil {
				t.Fatal(err)
			}
		})
		add("its pin removed", false, func(t *testing.T, v victim) {
			t.Helper()
			if err := os.Remove(filepath.Join(pins(t), "links", v.HostLink+"-"+h.hook)); err != nil {
				t.Fatal(err)
			}
		})
		add("replaced", true, func(t *testing.T, v victim) {
			t.Helper()
			l := pinned(t, v, h.hook)
			defer l.Close()
			if err := l.Update(stranger(t)); err != nil {
				t.Fatal(err)
			}
		})
		add("another before it", true, func(t *testing.T, v victim) {
			t.Helper()
			dev, err := net.InterfaceByName(v.HostLink)
			if err != nil {
				t.Fatal(err)
			}
			at := map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress}[h.hook]
			l, err := link.AttachTCX(link.TCXOptions{Interface: dev.Index, Program: stranger(t), Attach: at, Anchor: link.Head()})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
		})
	}
	return all
}

// offsets of values: struct endpoint of bpf/maps.h, struct point of bpf/policy_maps.h.
const (
	endpointPodMAC = 8
	pointACL       = 4
)

// altered changes one value of a map.
func altered(key any, change func(value []byte)) func(*ebpf.Map) error {
	return func(m *ebpf.Map) error {
		value, err := m.LookupBytes(key)
		if err != nil {
			return err
		}
		change(value)
		return m.Put(key, value)
	}
}

// entriesBroken are breakages of what the data path's maps hold of an endpoint.
func entriesBroken() []breakage {
	address := func(v victim) string { return v.Address.String() }
	in := func(name string, change func(v victim) func(*ebpf.Map) error) func(t *testing.T, v victim) {
		return func(t *testing.T, v victim) {
			t.Helper()
			inMap(t, name, change(v))
		}
	}
	deleted := func(v victim) func(*ebpf.Map) error {
		return func(m *ebpf.Map) error { return m.Delete(v.Address.As4()) }
	}
	return []breakage{
		{name: "bpf-endpoint deleted", kind: datapath.KindEntry, object: address, do: in("endpoints", deleted)},
		{name: "bpf-endpoint altered", kind: datapath.KindEntry, object: address, do: in("endpoints", func(v victim) func(*ebpf.Map) error {
			return altered(v.Address.As4(), func(b []byte) { b[endpointPodMAC+5]++ })
		})},
		{name: "bpf-endpoint, its link deleted", kind: datapath.KindEntry, object: address, do: func(t *testing.T, v victim) {
			t.Helper()
			dev, err := net.InterfaceByName(v.HostLink)
			if err != nil {
				t.Fatal(err)
			}
			inMap(t, "attachments", func(m *ebpf.Map) error { return m.Delete(uint32(dev.Index)) })
		}},
		{name: "policy deleted", kind: "policy", object: address, do: in("policy_points", deleted)},
		{name: "policy altered", kind: "policy", object: address, unjudged: true, do: in("policy_points", func(v victim) func(*ebpf.Map) error {
			return altered(v.Address.As4(), func(b []byte) { binary.LittleEndian.PutUint32(b[pointACL:], 0) })
		})},
		{name: "policy, its groups as a peer deleted", kind: "policy", object: address, unjudged: true, do: in("policy_identity", deleted)},
	}
}
