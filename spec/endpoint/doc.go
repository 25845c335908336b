// Package endpoint defines what every mknet program calls an endpoint: its
// identity, the kernel names derived from it, its addresses, its states and the
// record that describes it.
//
// An endpoint joins one CNI attachment (network, container ID, interface name)
// to one network that mknetd owns. Every ADD makes a new one with a fresh
// [Generation], so that two endpoints of the same attachment are never confused.
//
// The package is pure: it opens nothing, talks to no kernel and starts no
// goroutine. The prose beside it is in spec/topology.md and spec/life-cycle.md.
package endpoint
