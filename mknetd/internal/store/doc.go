// Package store keeps mknetd's durable state in one bbolt file: the endpoint
// records, the queue of freed slots, and named documents for other parts of the
// daemon. It implements the durable half of spec/life-cycle.md.
//
// Every write is one fsynced transaction: when a method returns nil, the change
// survives a kill, a crash and a power cut, and a record is whole or absent. All
// records carry a checksum, and Open reads the whole file before it trusts it: a
// store that is not exactly what mknetd wrote is refused and left as it is.
//
// The package knows no kernel object and takes no decision: it enforces the
// table of states in spec/endpoint, that an attachment, a generation and a slot
// belong to at most one record, and that a record never changes its identity.
package store
