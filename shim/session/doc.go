// Package session makes an authenticated session between mk-shim and mk-agent
// out of plain connections: the clear hellos, a Noise NNpsk0 handshake under the
// sandbox token, its confirmation, the sealed link configuration, and the second
// connection of the latency lane. It implements spec/pump-protocol.md.
//
// It owns no device and carries no packet: what comes out of it is handed to
// mknet/shim/pump. Everything that a peer sends before it is confirmed is
// bounded in bytes, in time and in number of peers, and changes nothing.
package session
