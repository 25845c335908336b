// Package delqueue is the durable queue of deferred DELs: what mk-cni writes when
// it cannot reach mknetd, and what mknetd (at start, when told) and later calls of
// mk-cni replay.
//
// An entry is one file in a private folder (see package privdir), written, synced
// and renamed before the DEL reports success, so that "queued" is never a lie. Its
// name is
//
//	<32 hex digits of sha256(network NUL containerID NUL ifName)>-<generation | "unknown">
//
// so that a repeated DEL replaces its own entry. A worker locks the file (flock,
// which ends with the process), renames it to NAME.claimed, deletes the endpoint,
// and removes the file; where the deletion did not work it renames it back. A
// claimed file without a lock belongs to a worker that died: the next one takes it
// over. What was read and is no entry is kept as NAME.bad for the operator and never
// acted on; what could not be read stays for a later turn.
//
// Two rules keep an old entry from deleting a new endpoint: one with a generation
// deletes exactly that generation, and one without ("unknown") carries the time at
// which it was queued and the boot it was queued in, and deletes nothing that is
// younger; where it carries a namespace's cookie, nothing that is elsewhere either.
package delqueue
