//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * Looking a packet up in the table of one direction of one policy: two searches,
 * and the lowest bit that both bitmaps have. Nothing here branches on
 * what is compared, because each branch would double what the verifier follows (a
 * mask of -1 or 0 counts as one in Linux 6.18: kernel/bpf/verifier.c,
 * maybe_fork_scalars; hence the products).
 * The functions are global, so that it follows each of them once.
 */

#ifndef MKNET_CLASSIFIER_H
#define MKNET_CLASSIFIER_H

#include "policy_maps.h"
#include "trace.h"

/* What a lookup returns: one of these, or rule << 1 | allow. */
enum {
	NO_MATCH = -1,
	TABLE_MISSING = -2,
};

/* lower: 1 where entry <= key. */
static __inline_always __u64 lower(__u32 entry, __u32 key)
{
	__u64 below = ((__u64)entry - key - 1) >> 63;

	opaque(below); /* or the compiler makes branches of it */
	return below;
}

/*
 * SEARCH sets at to the last of n (a power of four) entries that is not above key.
 * Each step reads three entries, which do not wait for one another, and leaves a
 * quarter.
 */
#define SEARCH(at, entries, n, key)                                                                \
	_Pragma("unroll") for (int step = (n) / 4; step > 0; step /= 4)                            \
	{                                                                                          \
		const __u32 *from = &entries[at & ((n)-4 * step)];                                 \
		at += (__u32)(lower(from[step], key) + lower(from[2 * step], key) +                \
			      lower(from[3 * step], key)) *                                        \
			step;                                                                      \
	}

static __inline_always __u32 lowest(__u64 m)
{
	m = (m & -m) - 1;
	m -= m >> 1 & 0x5555555555555555;
	m = (m & 0x3333333333333333) + (m >> 2 & 0x3333333333333333);
	m = (m + (m >> 4)) & 0x0f0f0f0f0f0f0f0f;
	return m * 0x0101010101010101 >> 56;
}

/* some: 1 where m is not 0, without a branch as well. */
static __inline_always __u32 some(__u64 m)
{
	__u64 minus = -m;

	opaque(minus);
	return (m | minus) >> 63;
}

/*
 * The rules that name a group which the peer holds, during one lookup; the stack
 * has no room for them. Programs of one CPU do not interrupt each other.
 */
struct rules {
	__u64 bits[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct rules);
} policy_scratch SEC(".maps");

#define once(x) (*(volatile typeof(x) *)&(x))

/*
 * LOOKUP defines a lookup in the tables of one class. peer is the address as on
 * the wire, key protocol << 16 | port.
 */
#define LOOKUP(name, map, type, W, A, S, R)                                                        \
	/* references sets m to the rules that name a group which the peer holds. */               \
	static __inline_always bool name##_references(struct type *t, __be32 *peer, __u64 *m)      \
	{                                                                                          \
		struct identity *id = map_lookup(&policy_identity, peer);                          \
                                                                                                   \
		_Pragma("unroll") for (int w = 0; w < W; w++) m[w] = 0;                            \
		if (!id)                                                                           \
			return true;                                                               \
		__u32 back = once(id->back);                                                       \
		for (int g = 0; g < MAX_GROUPS; g++) {                                             \
			__u32 group = once(id->group[g]), at = 0;                                  \
			if (!group)                                                                \
				break;                                                             \
			SEARCH(at, t->ref_group, R, group)                                         \
			at &= R - 1;                                                               \
			__u64 same = ((__u64)(t->ref_group[at] ^ group) - 1) >> 63;                \
			opaque(same);                                                              \
			_Pragma("unroll") for (int w = 0; w < W; w++) m[w] |=                      \
				t->ref_bits[at][w] * same;                                         \
		}                                                                                  \
		return once(id->front) == back && once(id->address) == *peer;                      \
	}                                                                                          \
                                                                                                   \
	__noinline int name(__u32 generation, __be32 peer, __u32 key)                              \
	{                                                                                          \
		__u32 zero = 0, a = 0, p = 0, addr;                                                \
		void *inner = map_lookup(&map, &generation);                                       \
                                                                                                   \
		if (!inner)                                                                        \
			return TABLE_MISSING;                                                      \
		struct type *t = map_lookup(inner, &zero);                                         \
		struct rules *r = map_lookup(&policy_scratch, &zero);                              \
		if (!t || !r)                                                                      \
			return TABLE_MISSING;                                                      \
		__u64 *m = r->bits;                                                                \
		__u32 named = 0; /* words of m that are not 0 */                                   \
		if (t->references) {                                                               \
			bool same = name##_references(t, &peer, m);                                \
			/* Else the identity's memory was given to another meanwhile. */           \
			if (same || name##_references(t, &peer, m)) {                              \
				_Pragma("unroll") for (int w = 0; w < W; w++) named |=             \
					some(m[w]) << w;                                           \
			}                                                                          \
		}                                                                                  \
		addr = __builtin_bswap32(once(peer)); /* not before: the stack is full */          \
		SEARCH(a, t->addr_start, A, addr)                                                  \
		SEARCH(p, t->port_start, A, key)                                                   \
		a = t->addr_set[a & (A - 1)];                                                      \
		p = t->port_set[p & (A - 1)];                                                      \
		__u32 left = (a >> 16 | named) & p >> 16;                                          \
		a &= S - 1;                                                                        \
		p &= S - 1;                                                                        \
		for (int i = 0; i < W && left; i++) {                                              \
			__u64 w = lowest(left) & (W - 1), of = named >> w & 1;                     \
			left &= left - 1;                                                          \
			opaque(of);                                                                \
			__u64 x = (t->addr_bits[a][w] | m[w] * of) & t->port_bits[p][w];           \
			if (x) {                                                                   \
				__u64 rule = w << 6 | lowest(x);                                   \
				/* Linux 6.1 loses the bounds of an OR, so that the mask stays. */ \
				opaque(rule);                                                      \
				rule &= 64 * W - 1;                                                \
				__sync_fetch_and_add(&t->hits[rule], 1);                           \
				return rule << 1 | ((t->allow[w] & (x & -x)) != 0);                \
			}                                                                          \
		}                                                                                  \
		__sync_fetch_and_add(&t->no_match, 1);                                             \
		return NO_MATCH;                                                                   \
	}

LOOKUP(look_small, policy_small, small_table, 1, 256, 128, 16)
LOOKUP(look_medium, policy_medium, medium_table, 4, 1024, 512, 64)
LOOKUP(look_large, policy_large, large_table, 16, 4096, 2048, 256)

/* What ask returns, as bits. */
enum {
	MATCHED = 1 << 0,
	ALLOWED = 1 << 1, /* by the rule that matched */
	RESTRICTS = 1 << 2,
	SLOT_MISSING = 1 << 3,
	BROKEN = 1 << 4, /* the table is missing */
};

/*
 * find evaluates one direction of one policy: number << 8 | direction. rule is set
 * where one matches.
 */
static __inline_always int find(__u32 what, __be32 peer, __u32 key, int *rule)
{
	__u32 index = what >> 8 << 1 | (way(what) == INGRESS);
	__u64 *p = map_lookup(&policy_slots, &index);

	if (!p)
		return SLOT_MISSING;
	__u64 slot = once(*p);
	if (!(slot & SLOT_VALID))
		return SLOT_MISSING;
	int out = slot & SLOT_RESTRICTS ? RESTRICTS : 0;
	switch (slot >> 32 & 0xff) {
	case 0:
		return out;
	case 1:
		*rule = look_small(slot, peer, key);
		break;
	case 2:
		*rule = look_medium(slot, peer, key);
		break;
	case 3:
		*rule = look_large(slot, peer, key);
		break;
	default:
		return BROKEN;
	}
	if (*rule == TABLE_MISSING)
		return BROKEN;
	if (*rule == NO_MATCH)
		return out;
	return out | MATCHED | (*rule & 1 ? ALLOWED : 0);
}

/*
 * ask is find for the endpoint self. With TOLD it tells the trace what an ACL says,
 * and which rule of a group (GROUP) matches; that none does, the caller tells.
 */
__noinline int ask(__u32 what, __be32 peer, __u32 key, __be32 self)
{
	int rule = NO_MATCH, r = find(what, peer, key, &rule);

	if (unlikely(what & TOLD) && !(r & (SLOT_MISSING | BROKEN)) && (r & MATCHED || !(what & GROUP))) {
		bool drops = r & MATCHED ? !(r & ALLOWED) : r & RESTRICTS;
		trace(what & GROUP ? GROUP_PASS : drops ? ACL_DROP : ACL_PASS, self, what, what >> 8,
		      r & MATCHED ? rule >> 1 : NO_RULE);
	}
	return r;
}

#endif
