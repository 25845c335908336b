package guest

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// writeModule writes the smallest ELF file with a .modinfo.
func writeModule(t *testing.T, path, info string) {
	t.Helper()
	names := "\x00.shstrtab\x00.modinfo\x00"
	const head, section = 64, 64
	body := append([]byte(names), info...)
	var b bytes.Buffer
	b.Write([]byte{0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	put := func(v ...any) {
		for _, x := range v {
			_ = binary.Write(&b, binary.LittleEndian, x)
		}
	}
	put(uint16(1), uint16(62), uint32(1), uint64(0), uint64(0), uint64(head+len(body)), uint32(0), uint16(head), uint16(0), uint16(0), uint16(section), uint16(3), uint16(1))
	b.Write(body)
	put(make([]byte, section))
	for _, s := range []struct {
		name         uint32
		kind         uint32
		offset, size int
	}{{1, 3, head, len(names)}, {11, 1, head + len(names), len(info)}} {
		put(s.name, s.kind, uint64(0), uint64(0), uint64(s.offset), uint64(s.size), uint32(0), uint32(0), uint64(1), uint64(0))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestModuleOrder(t *testing.T) {
	dir := t.TempDir()
	for name, info := range map[string]string{
		"net/vmw_vsock/vsock.ko":                             "license=GPL\x00depends=\x00",
		"net/vmw_vsock/vmw_vsock_virtio_transport.ko":        "depends=vmw_vsock_virtio_transport_common,vsock,virtio_ring\x00",
		"net/vmw_vsock/vmw-vsock-virtio-transport-common.ko": "name=x\x00depends=vsock\x00",
		"drivers/net/tun.ko":                                 "description=depends\x00",
	} {
		writeModule(t, dir+"/kernel/"+name, info)
	}
	if err := os.WriteFile(dir+"/modules.builtin", []byte("kernel/drivers/virtio/virtio_ring.ko\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	files, err := moduleOrder(dir, []string{"vmw_vsock_virtio_transport", "tun", "vsock", "virtio_ring"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, moduleName(f))
	}
	want := []string{"vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport", "tun"}
	if !slices.Equal(names, want) {
		t.Errorf("order %v, want %v", names, want)
	}
	if _, err := moduleOrder(dir, []string{"nonesuch"}); err == nil || !strings.Contains(err.Error(), "nonesuch") {
		t.Errorf("a module that is not there: %v", err)
	}
}

// TestLibraries looks at a program that every Debian machine has.
func TestLibraries(t *testing.T) {
	libs, err := libraries("/bin/bash")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"libc.so.6", "libtinfo.so.6", "ld-linux-x86-64.so.2"} {
		if !slices.ContainsFunc(libs, func(l string) bool { return filepath.Base(l) == want }) {
			t.Errorf("bash needs %v, without %s", libs, want)
		}
	}
	static, err := libraries("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if len(static) > 0 && os.Getenv("CGO_ENABLED") == "0" {
		t.Errorf("this static program needs %v", static)
	}
}
