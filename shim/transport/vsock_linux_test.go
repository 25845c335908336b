package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
)

// A socket that is neither bound nor connected belongs to no transport: the test
// reaches nobody.
func TestVsockBuffersOnThisKernel(t *testing.T) {
	c, err := vsockSocket(Address{scheme: schemeVsock, cid: CIDLoopback, port: DefaultPort})
	if errors.Is(err, unix.EAFNOSUPPORT) {
		netlab.Missing(t, fmt.Errorf("AF_VSOCK: %w", err), "modprobe vsock")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for _, opt := range []int{unix.SO_VM_SOCKETS_BUFFER_MAX_SIZE, unix.SO_VM_SOCKETS_BUFFER_SIZE} {
		b := make([]byte, 8)
		if _, err := c.GetsockoptBytes(unix.AF_VSOCK, opt, b); err != nil || binary.NativeEndian.Uint64(b) != bufferBytes {
			t.Errorf("option %d is %d, %v; want %d", opt, binary.NativeEndian.Uint64(b), err, bufferBytes)
		}
	}
}
