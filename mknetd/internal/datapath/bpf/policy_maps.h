//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * The maps of policy. spec/policy-datapath.md says what is in them and in which
 * order the daemon changes them; the daemon alone writes points, slots, tables and
 * identities.
 */

#ifndef MKNET_POLICY_MAPS_H
#define MKNET_POLICY_MAPS_H

#include "kernel.h"

/* Directions, as numbers of the conntrack key (hook) and of points' flags. */
enum {
	EGRESS = 1,  /* leaves the endpoint */
	INGRESS = 2, /* enters it */
	/* Beside a direction that a function gets: */
	GROUP = 1 << 6, /* the policy is a group */
	TOLD = 1 << 7,	/* the trace is told, see trace.h */
};

/* The direction alone. */
#define way(dir) ((dir) & (EGRESS | INGRESS))

#define MAX_GROUPS 16

/* Flags of a point. EGRESS and INGRESS: enforced in that direction. */
enum {
	POINT_ATTACHED = 1 << 2, /* something is attached */
	POINT_CLOSED = 1 << 3,	 /* more groups than a point can hold */
	POINT_PROBES = 1 << 4,	 /* what the node itself sends passes */
};

/* What applies to an endpoint. front and back are one version. */
struct point {
	__u32 front;
	__u32 acl; /* policy number, 0: none */
	__u32 group[MAX_GROUPS];
	__u32 epoch[2]; /* egress, ingress */
	__u16 flags;
	__u16 groups;
	__be32 address; /* the key again */
	__u64 id;
	__u32 reserved;
	__u32 back;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, struct point);
} policy_points SEC(".maps");

/* The groups that a peer holds. */
struct identity {
	__u32 front;
	__u32 epoch;
	__u32 group[MAX_GROUPS];
	__be32 address;
	__u32 back;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, struct identity);
} policy_identity SEC(".maps");

/* Flags of a slot, bits 40 to 47; bits 32 to 39 are the class, below is the generation. */
#define SLOT_VALID (1ULL << 40)
#define SLOT_RESTRICTS (1ULL << 41)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 8192);
	__type(key, __u32);
	__type(value, __u64);
} policy_slots SEC(".maps");

/* A table: one direction of one policy, see mknetd/internal/classifier. */
#define TABLE(name, W, A, S, R)                                                                    \
	struct name {                                                                              \
		__u32 magic, flags, policy, generation, rules, addresses, ports, addr_rows;        \
		__u32 port_rows, references;                                                       \
		__u64 no_match;                                                                    \
		__u64 zero[2];                                                                     \
		__u64 allow[W];                                                                    \
		__u32 addr_start[A], port_start[A];                                                \
		__u32 addr_set[A], port_set[A]; /* row, words of it that are not 0 << 16 */        \
		__u64 addr_bits[S][W], port_bits[S][W];                                            \
		__u32 ref_group[R];                                                                \
		__u64 ref_bits[R][W];                                                              \
		__u64 hits[64 * W];                                                                \
	};

#define TABLES(map, type_name)                                                                     \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);                                           \
		__uint(max_entries, 4096);                                                         \
		__uint(key_size, sizeof(__u32));                                                   \
		__uint(value_size, sizeof(__u32));                                                 \
		__array(values, struct {                                                           \
			__uint(type, BPF_MAP_TYPE_ARRAY);                                          \
			__uint(max_entries, 1);                                                    \
			__uint(key_size, sizeof(__u32));                                           \
			__uint(value_size, sizeof(struct type_name));                              \
		});                                                                                \
	} map SEC(".maps");

TABLE(small_table, 1, 256, 128, 16)
TABLE(medium_table, 4, 1024, 512, 64)
TABLE(large_table, 16, 4096, 2048, 256)
TABLES(policy_small, small_table)
TABLES(policy_medium, medium_table)
TABLES(policy_large, large_table)

/* A flow, as the packets of one direction name it at one hook. */
struct ct_key {
	__be32 saddr, daddr;
	__be16 sport, dport; /* ICMP queries: the identifier, in both; 0 where there are none */
	__u8 proto;
	__u8 hook; /* EGRESS or INGRESS */
	__u16 scope;
	__u32 zero;
};

enum {
	CT_NEW = 1,
	CT_ESTABLISHED = 2,
	CT_FIN_WAIT = 3,
};

enum {
	CT_REPLY = 1 << 0, /* the reply direction of what was admitted */
	CT_FIN = 1 << 1,   /* this direction has sent a FIN; fin is set */
	CT_ACK = 1 << 2,   /* this direction has sent an ACK; ack and window are set */
	CT_PROBE = 1 << 3, /* admitted as a probe from the node, not by rules */
};

struct ct {
	__u64 seen;	    /* CLOCK_MONOTONIC, ns */
	__u32 attach_epoch; /* of the endpoint, in the direction that was admitted */
	__u32 peer_epoch;   /* of the peer's identity; 0: had none */
	__u32 ack;	    /* TCP: highest acknowledgement; before the first (no CT_ACK): its SYN's number + 1 */
	__u32 window;	    /* TCP: last window, scaled */
	__u32 fin;	    /* TCP: the number behind its FIN */
	__u8 state;
	__u8 flags;
	__u8 scale; /* TCP: of its windows */
	__u8 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__type(key, struct ct_key);
	__type(value, struct ct);
} policy_conntrack SEC(".maps");

/* What a first fragment says for the later ones. */
struct frag_key {
	__be32 saddr, daddr;
	__be16 id;
	__u8 proto;
	__u8 zero;
	__u32 scope;
};

struct frag {
	__be16 sport, dport;
	__u32 zero;
	__u64 seen; /* CLOCK_MONOTONIC, ns */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct frag_key);
	__type(value, struct frag);
} policy_fragments SEC(".maps");

/* Reasons, spec/policy/reason.go. */
enum reason {
	ENTERED = 100,
	NO_ENDPOINT = 200,
	NO_SLOT = 201,
	NO_TABLE = 202,
	NO_FRAGMENT = 204,
	CT_MISS = 208,
	CT_HIT = 209,
	CT_OLD = 210,
	CT_FULL = 211,
	RELATED = 212,
	ACL_PASS = 300,
	ACL_DROP = 301,
	GROUP_PASS = 302,
	GROUP_DROP = 303,
	PARSE_DROP = 304,
	FRAME_DROP = 305,
	NOT_ENFORCED = 306,
	PROBE = 307,
	REDIRECTED = 500,
	REDIRECTED_PEER = 501,
	TO_STACK = 502,
	DROPPED = 503,
	TO_ENDPOINT = 504,
	FIRST_REASON = 200,
	REASONS = 128,
};

/* Reason - FIRST_REASON -> how often, per CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASONS);
	__type(key, __u32);
	__type(value, __u64);
} policy_reasons SEC(".maps");

static __inline_always void reason(__u32 r)
{
	__u32 i = r - FIRST_REASON;
	__u64 *n = map_lookup(&policy_reasons, &i);

	if (likely(n))
		(*n)++;
}

#endif
