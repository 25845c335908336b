// Package vsockswitch gives QEMU guests an AF_VSOCK device without vhost_vsock in
// the host's kernel: it is the back end of QEMU's vhost-user-vsock-pci (vhost-user
// protocol, split virtqueues, virtio 1.2 section 5.10) and comes in two kinds.
//
//   - Pair joins two guests, a primary and a child. The primary dials the child's
//     CID; the child sees its peer as CID 2, the host. Credit stays end to end
//     between the two kernels.
//   - Hybrid joins one guest to Unix sockets as Firecracker does: a program writes
//     "CONNECT port" to the socket; a guest that dials the host's port P reaches
//     the socket with the suffix "_P".
//
// Nothing waits in the switch: a packet goes from the memory of one guest into
// the memory of the other when that one has given a buffer, and else holds up its
// sender. When a guest stops, what its ring still holds is delivered, bounded by
// DrainLimit, and then every connection is reset on the surviving side.
//
// Bytes of a guest are checked before use; they can stop its own device only.
package vsockswitch
