//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * The maps, and what is in them. layout.go mirrors every struct; a test compares
 * sizes and offsets with the object's BTF. All of them are pinned, so that a
 * change of a key or a value is a change that an upgrade must be told of.
 */

#ifndef MKNET_MAPS_H
#define MKNET_MAPS_H

#include "kernel.h"

/* Flags of an endpoint. */
enum {
	EP_STACK_ONLY = 1 << 0,	 /* what it sends and gets goes through the host stack */
	EP_PASS_OTHER = 1 << 1,	 /* frames other than IPv4 and ARP are let through */
};

struct endpoint {
	__u32 ifindex; /* host end */
	__u16 mtu;     /* bytes, without the Ethernet header */
	__u16 flags;   /* EP_... */
	__u8 pod_mac[ETH_ALEN];
	__u8 host_mac[ETH_ALEN];
	__be32 gateway;
	__u64 id; /* first 8 bytes of the generation, big-endian; for the daemon */
};

/* Address of a workload (network byte order) -> the workload. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, struct endpoint);
} endpoints SEC(".maps");

struct attachment {
	__be32 addr;
	__u8 name[16]; /* of the link; for the daemon */
};

/* Index of a host end -> whose it is. Read where the packet does not tell. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct attachment);
} attachments SEC(".maps");

/* What became of a frame. */
enum outcome {
	PEER,		/* to a pod of this node, past the host stack, by bpf_redirect_peer */
	REDIRECT,	/* the same by bpf_redirect */
	STACK,		/* from the endpoint to the host stack */
	DELIVERED,	/* from the host stack to the endpoint */
	ARP,		/* request for the gateway, answered */
	OTHER,		/* neither IPv4 nor ARP, or tagged; let through */
	DROP_ADDRESS,	/* source address is not the endpoint's */
	DROP_MAC,	/* source hardware address is not the endpoint's */
	DROP_HEADER,	/* IPv4 header missing or malformed */
	DROP_OTHER,	/* neither IPv4 nor ARP */
	DROP_VLAN,	/* tagged (802.1Q, 802.1ad) */
	DROP_UNKNOWN,	/* no endpoint is known on the link; counted under 0.0.0.0 */
	DROP_ACL,	/* the NetworkACL denies, at the endpoint whose it is */
	DROP_GROUP,	/* the SecurityGroups deny, likewise */
	DROP_POLICY,	/* cannot be judged where policy is enforced */
	OUTCOMES = 16,
};

struct count {
	__u64 packets;
	__u64 bytes; /* of whole frames; a GSO frame counts as one */
};

struct counters {
	struct count outcome[OUTCOMES];
};

/* Address of an endpoint -> what became of its frames, per CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 65536 + 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, struct counters);
} counts SEC(".maps");

/*
 * One flow between two endpoints of this node, the same key for both directions:
 * the side with the numerically lower address comes first.
 */
struct flow_key {
	__be32 addr[2];
	__be16 port[2]; /* ICMP: the query's identifier, twice; 0 where there is none */
	__u8 proto;
	__u8 pad[3];
};

enum path {
	BY_REDIRECT = 1, /* begun past the host stack */
	BY_STACK = 2,	 /* delivered by the host stack, which may have translated it */
};

struct flow {
	__u32 seen; /* when last: CLOCK_MONOTONIC in units of 2^30 ns */
	__u8 path;  /* enum path */
	__u8 pad[3];
};

/*
 * The path of every flow between endpoints of this node. An LRU: it needs no
 * collector, and a flow that fell out goes through the host stack if it cannot
 * be told from a new one.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

#endif
