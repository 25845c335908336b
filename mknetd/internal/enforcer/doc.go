// Package enforcer brings the policy maps of the data path to what the documents
// and endpoints ask for, in the order of spec/policy-datapath.md, so that a packet
// meets each policy either as it was or as it is to be, whatever step fails.
//
// It decides what every map holds and when it is written; a [Kernel] writes. It
// remembers what it has written, and after an error the next call goes on from
// there.
package enforcer
