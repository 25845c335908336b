// Package nftrace tells what the kernel's nf_tables does with single packets of one
// flow, rule by rule; the chains of iptables-nft are among its chains.
//
// For the time of a trace it has a table of its own that sets nftrace on the packets
// of the flow (net/netfilter/nf_tables_trace.c) and judges nothing. The table belongs
// to the socket that made it (NFT_TABLE_F_OWNER, Linux 5.12): the kernel removes it
// when that socket is closed, also by the death of the process. No chain of anybody
// else is changed. It works on the network namespace of the calling thread.
package nftrace
