// Package transport reaches the child: AF_VSOCK, the hybrid Unix sockets of
// Firecracker and Cloud Hypervisor, and plain Unix sockets for development, all
// behind net.Conn. It implements the first part of spec/pump-protocol.md.
//
//	vsock://CID:PORT[?transport=multikernel]   dial and listen; CID may be "any" to listen
//	hvsock:///path:PORT                        dial only
//	unix:///path                               dial and listen
//
// It tells apart why a peer cannot be reached, because a runtime acts on that.
// It authenticates nobody: that is mknet/shim/session. Every connection has
// socket buffers of 1 MiB and gives its descriptor by SyscallConn.
package transport
