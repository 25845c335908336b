// Package engine is the only part of mknetd that knows the order of steps: what
// an ADD builds and in which order, when a record is written, who may bind, when
// a shim is fenced, and how a restarted daemon brings kernel and records into
// agreement. It implements spec/life-cycle.md and spec/topology.md.
//
// One table of kernel objects (table.go) drives creation, checking, deletion,
// repair and the inventory. The objects themselves live in topo (links,
// addresses, routes, rules, sysctls) and ipt (iptables); the durable records in
// store. The engine decides and orders; it talks to no kernel interface itself,
// except for the process handles in process.go.
//
// Locks, always taken in this order: attachment, endpoint, namespace. No lock is
// held across the kernel work of two endpoints, except a namespace's own.
package engine
