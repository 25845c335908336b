// Package pods measures the network of ordinary pods as a node of each kind gives it.
//
// A node is a process in a private host of its own (network and mount namespaces),
// started again from the benchmark's binary with [Command]. It adds its pods, then
// measures the way between the first two of them whenever it is asked, so that the
// benchmark can interleave the kinds.
package pods
