//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * Which flows between two pods of this node may pass by the host stack.
 *
 * A packet that is redirected is seen neither by the host's conntrack nor by its
 * NAT. The reply of a connection that the host translated (a hostPort, a service
 * address) must go back the way it came, or it arrives with the wrong source. So
 * a flow stays on the path that it began on.
 */

#ifndef MKNET_FLOW_H
#define MKNET_FLOW_H

#include "maps.h"
#include "packet.h"

/*
 * How long a silent flow is remembered, in units of 2^30 ns. A packet of a
 * forgotten TCP connection goes through the host stack, which is always right.
 * With other protocols it looks like the first of a new flow, so that theirs
 * exceeds every default time-out of the host's conntrack but TCP's
 * (Documentation/networking/nf_conntrack-sysctl.rst: 600 s).
 */
#define FLOW_TCP 80000
#define FLOW_OTHER 700

static __inline_always __u32 now(void)
{
	return ktime_get_coarse_ns() >> 30;
}

static __inline_always void flow_key(const struct tuple *t, struct flow_key *k)
{
	bool swap = t->saddr > t->daddr;

	*k = (struct flow_key){
		.addr = {swap ? t->daddr : t->saddr, swap ? t->saddr : t->daddr},
		.port = {swap ? t->dport : t->sport, swap ? t->sport : t->dport},
		.proto = t->proto,
	};
}

/* flow_find returns the flow's entry, NULL where it is not known or too old. */
static __inline_always struct flow *flow_find(const struct flow_key *k)
{
	struct flow *f = map_lookup(&flows, k);

	if (!f)
		return NULL;
	__u32 t = now(), age = t - f->seen;
	if (age) {
		if (age > (k->proto == IPPROTO_TCP ? FLOW_TCP : FLOW_OTHER))
			return NULL;
		f->seen = t; /* written once a second at most */
	}
	return f;
}

static __inline_always bool flow_set(const struct flow_key *k, __u8 path)
{
	struct flow f = {.seen = now(), .path = path};

	return map_update(&flows, k, &f, BPF_ANY) == 0;
}

/*
 * flow_redirects reports whether the packet, from a pod to a pod of this node,
 * may pass by the host stack.
 */
static __inline_always bool flow_redirects(struct __sk_buff *skb, const struct tuple *t)
{
	struct flow_key k;
	struct flow *f;

	if (unlikely(t->icmp_error)) {
		struct tuple q;

		/* The host stack translates what the error quotes. */
		if (!quoted(skb, t, &q))
			return false;
		flow_key(&q, &k);
		f = flow_find(&k);
		return f && f->path == BY_REDIRECT;
	}
	flow_key(t, &k);
	f = flow_find(&k);
	if (likely(f))
		return f->path == BY_REDIRECT;
	return t->begins && flow_set(&k, BY_REDIRECT);
}

/*
 * flow_delivered notes that the host stack delivered the packet to a pod, from an
 * endpoint of this node. A TCP connection that began by redirect stays there (a
 * stray packet of it, too long or at the end of its TTL, is no reason to leave),
 * unless this is the SYN of a new one with the same ports. With every other
 * protocol the newer path wins.
 */
static __inline_always void flow_delivered(const struct tuple *t)
{
	struct flow_key k;

	if (!t->ports || t->icmp_error)
		return;
	flow_key(t, &k);
	struct flow *f = flow_find(&k);
	if (f && (f->path == BY_STACK || (t->proto == IPPROTO_TCP && !t->begins)))
		return;
	flow_set(&k, BY_STACK);
}

#endif
