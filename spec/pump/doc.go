// Package pump defines the protocol between mk-shim in the primary and mk-agent
// in the child: the clear hello, the handshake messages, the link configuration
// that a confirmed session carries, and the data frames that follow.
//
// The package is pure: it encodes, decodes and compares. It opens nothing,
// starts no goroutine and holds no key. The handshake itself is in
// mknet/shim/session, the data plane in mknet/shim/pump; both ends run the same
// code. The prose beside it is spec/pump-protocol.md.
//
// Every decoder is strict and bounded: it allocates nothing that the peer chose
// the size of, and one value has exactly one encoding.
package pump
