// Package plugin is the CNI plugin: one process is one call. It validates, keeps
// the generation cache and the queue of deferred DELs, and asks mknetd; it never
// touches a link, a route or a rule.
//
// Standard output carries exactly one JSON document or nothing. It is taken away
// from everybody at the start (descriptor 1 becomes standard error), so that no
// library, no delegate and no panic can add to it, and written once at the end.
//
// The contract is in spec/cni.md, the result in spec/cni-result.md.
package plugin
