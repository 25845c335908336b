// Package policy defines the documents that say which packets an endpoint may
// send and receive, their validation, their size, and the reference model that
// gives the verdict for a packet. The prose beside it is spec/policy.md.
//
// A document comes from [Parse] and is then known to be valid by itself; a [Set]
// of documents is valid as a whole: what is referred to exists, nothing is over a
// limit. The command line, the daemon and the tests of the data path all use
// these functions, so that none of them can accept or decide otherwise.
//
// The package is pure: it opens nothing and starts no goroutine. Values that
// came out of it are not to be changed.
package policy
