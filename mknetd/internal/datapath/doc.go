// Package datapath is the eBPF data path of endpoints whose host end is a veth of
// this node: it loads the programs, pins them and their maps in bpffs, attaches
// them to the host ends and keeps the endpoint map. It makes no link, address or
// rule, and it never removes a program or filter that is not its own.
//
// # What the programs do
//
// Ordinary pods get from_container on the TC ingress of their host end and
// to_container on its TC egress. A packet for another pod of the node is sent
// there past the host stack (bpf_redirect_peer, or bpf_redirect where the kernel
// lacks it); everything else goes to the host stack: other destinations, what the
// pod sends to itself, fragments, IP options, a TTL of 1, packets over the
// destination's MTU. A flow stays on the path that it began on, so that replies
// of connections that the host translated go back through it. Child kernels get
// from_child and to_child, which never redirect; and nothing is redirected to
// a child. See bpf/datapath.c and spec/datapath.md.
//
// # What outlives the process
//
// Everything below Config.Dir: maps/NAME, programs/NAME and, where the kernel
// has TCX, links/LINK-ingress and links/LINK-egress. Elsewhere cls_bpf filters of
// a clsact qdisc hold the programs, with FilterPriority and FilterHandle. A new
// process takes the maps as they are and replaces each attached program in
// place: no packet passes unjudged and none is lost.
//
// The objects are compiled by `make generate` and committed; building and testing
// need no compiler. The C sources are under GPL-2.0-only OR BSD-2-Clause, since the
// kernel opens its helpers to GPL-compatible programs only.
package datapath

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -go-package datapath -target bpfel -no-global-types program bpf/datapath.c -- -O2 -g -Wall -Wextra -Werror -Wno-unused-function -Wno-missing-field-initializers
