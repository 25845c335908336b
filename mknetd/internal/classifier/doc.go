// Package classifier compiles one direction of one policy into a table that the
// data path looks a packet up in, at a cost that does not grow with the rules. It
// is pure: it touches no map and no kernel.
//
// # Method
//
// The rules stand in the order in which they decide, and rule i is bit i of every
// bitmap. The 32-bit numbers of peers' addresses are divided into intervals within
// which the same rules match, and likewise the numbers protocol<<16|port
// (spec/policy: Intervals). A lookup searches the packet's two intervals, ANDs
// their bitmaps, and the lowest set bit is the rule that decides. The bitmaps of the
// groups that the peer holds are ORed to that of its address first, so that a peer's
// membership is not in the table at all. Equal bitmaps are kept once: intervals name
// theirs by number, and say which of its words are not zero, so that only words that
// both have are read, of however many.
//
// # The table
//
// A table is one value of an ARRAY map with one entry, in one of three classes
// (see Class). All numbers are little-endian, all sizes in bytes; W, A, S, R are
// those of the class, and every part begins at a multiple of 8.
//
//	offset  size       what
//	0       64         header, see below
//	64      8*W        allow      u64[W]     rule i allows when its bit is set
//	...     4*A        addr_start u32[A]     where address intervals begin, in order, from 0
//	...     4*A        port_start u32[A]     likewise for protocol<<16|port
//	...     4*A        addr_set   u32[A]     of each address interval: its row, and in the upper
//	                                         half which words of that row are not zero
//	...     4*A        port_set   u32[A]
//	...     8*W*S      addr_bits  u64[S][W]  rows
//	...     8*W*S      port_bits  u64[S][W]
//	...     4*R        ref_group  u32[R]     numbers of the groups that rules name, in order
//	...     8*W*R      ref_bits   u64[R][W]  the rules that name each
//	...     8*64*W     hits       u64[64*W]  written by the data path: packets that rule i decided
//
//	header: 0 magic u32, 4 flags u32, 8 policy u32, 12 generation u32, 16 rules u32,
//	20 address intervals u32, 24 port intervals u32, 28 address rows u32,
//	32 port rows u32, 36 references u32, 40 no match u64 (packets that no rule
//	matched; written by the data path), 48 zero
//
// Unused entries at the end need no test: of addr_start and port_start they are
// 0xFFFFFFFF, and their addr_set and port_set are those of the last interval,
// since 255.255.255.255 finds them; of ref_group they are 0xFFFFFFFF, which is no
// group's number. Unused rows are zero.
//
// # The search
//
// The last entry that is not above the key, without a branch, as the verifier
// needs it (each branch would double its states). A is a power of four. The three
// entries of a step do not wait for one another, so that it takes the time of one:
//
//	at = 0
//	for step = A/4; step > 0; step /= 4:
//	    at += step * ((start[at+step] <= key) + (start[at+2*step] <= key) + (start[at+3*step] <= key))
package classifier
