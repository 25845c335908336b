// Package ipt owns everything that mknet has in iptables: the dispatch trees
// that all endpoints share, and the chains of each endpoint in the tables raw,
// security (mangle where that is missing), nat and filter. spec/firewall.md says
// what the rules mean; this package renders, commits, compares and removes them.
//
// It makes no link, no route and no decision about an endpoint: the record has
// all of that. What does not carry a full generation in its comment, or the mark
// of the shared parts, is foreign and never touched.
package ipt
