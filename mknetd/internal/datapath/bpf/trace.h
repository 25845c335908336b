//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * Telling what becomes of single packets, while somebody asks (`mknetd trace`).
 *
 * A program asks once about each packet whether any session is open: one load from
 * trace_until. Only then is the packet compared with the sessions, and only one
 * that matches makes events. A session has an end of its own, so that all of it
 * stops also when the daemon is gone.
 */

#ifndef MKNET_TRACE_H
#define MKNET_TRACE_H

#include "packet.h"
#include "policy_maps.h"

#define TRACE_SESSIONS 16
#define NO_RULE 0xffff

/* Which program tells. */
enum {
	FROM_CONTAINER = 1,
	TO_CONTAINER = 2,
	FROM_CHILD = 3,
	TO_CHILD = 4,
};

/* The latest end of all sessions, CLOCK_MONOTONIC in ns; 0: there is none. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} trace_until SEC(".maps");

/* A flow that is to be told of, both directions of it. until is written last. */
struct trace_session {
	__u64 until;	 /* CLOCK_MONOTONIC, ns; 0: no session */
	__be32 from, to; /* 0: any */
	__be16 port;	 /* of to; 0: any */
	__u16 proto;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TRACE_SESSIONS);
	__type(key, __u32);
	__type(value, struct trace_session);
} trace_sessions SEC(".maps");

/* The packet at work; programs of one CPU do not interrupt each other. */
struct trace_packet {
	__u64 began; /* CLOCK_MONOTONIC, ns */
	__u64 lost;  /* events of this CPU that found no room, ever */
	__be32 saddr, daddr;
	__be16 sport, dport;
	__u16 sessions, replies; /* bits: who asks, and whose reply it is; 0 between packets */
	__u8 proto, hook, tcp_flags, zero;
	__u32 len;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct trace_packet);
} trace_packets SEC(".maps");

/* What the daemon reads. */
struct trace_event {
	__u64 began, time; /* CLOCK_MONOTONIC, ns; began: the same for all events of one run */
	__be32 saddr, daddr;
	__be16 sport, dport;
	__u16 sessions, replies;
	__u8 proto, hook, tcp_flags;
	__u8 dir;	 /* EGRESS, INGRESS: at which point; 0: at none */
	__u32 len;	 /* of the frame */
	__be32 endpoint; /* whose point it is */
	__u16 reason;
	__u8 outcome; /* enum outcome, with reasons from 500 on */
	__u8 zero;
	__u32 policy; /* number; 0: none */
	__u32 rule;   /* of its direction; NO_RULE: a default */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} trace_events SEC(".maps");

/*
 * trace tells of the packet at work, if anybody asks for it. what is a reason, and
 * from bit 16 on an outcome. A reason from 500 on is the packet's last.
 */
__noinline int trace(__u32 what, __be32 self, __u32 dir, __u32 policy, __u32 rule)
{
	__u32 zero = 0;
	struct trace_packet *p = map_lookup(&trace_packets, &zero);

	if (!p || !p->sessions)
		return 0;
	struct trace_event *e = ringbuf_reserve(&trace_events, sizeof(*e), 0);
	if (!e) {
		p->lost++;
		goto out;
	}
	*e = (struct trace_event){
		.began = p->began,
		.time = ktime_get_ns(),
		.saddr = p->saddr,
		.daddr = p->daddr,
		.sport = p->sport,
		.dport = p->dport,
		.sessions = p->sessions,
		.replies = p->replies,
		.proto = p->proto,
		.hook = p->hook,
		.tcp_flags = p->tcp_flags,
		.dir = way(dir),
		.len = p->len,
		.endpoint = self,
		.reason = what,
		.outcome = what >> 16,
		.policy = policy,
		.rule = rule,
	};
	ringbuf_submit(e, 0);
out:
	if ((what & 0xffff) >= REDIRECTED)
		p->sessions = 0; /* or a packet that nobody asks for would be told of under a session that begins with it */
	return 0;
}

/* trace_read fills p with the packet's tuple, and reports whether all of it is known. */
static __inline_always bool trace_read(struct __sk_buff *skb, struct trace_packet *p)
{
	struct iphdr ip;
	__u8 b[16];

	if (skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return false;
	p->saddr = ip.saddr;
	p->daddr = ip.daddr;
	p->proto = ip.proto;
	p->sport = p->dport = 0;
	p->tcp_flags = 0;
	if (!has_ports(ip.proto))
		return true;
	if (ip.frag_off & htons(IP_OFFSET)) {
		struct frag_key k = {.saddr = ip.saddr, .daddr = ip.daddr, .id = ip.id, .proto = ip.proto};
		struct frag *f = map_lookup(&policy_fragments, &k);
		if (f) {
			p->sport = f->sport;
			p->dport = f->dport;
		}
		return f;
	}
	__u32 at = ETH_HLEN + ip.ihl * 4;
	if (ip.proto == IPPROTO_TCP) {
		if (skb_load_bytes(skb, at, b, 14))
			return false;
		p->tcp_flags = b[13];
	} else if (skb_load_bytes(skb, at, b, 4)) {
		return false;
	}
	p->sport = *(__be16 *)b;
	p->dport = *(__be16 *)(b + 2);
	return true;
}

/* wants: 0 where the session does not ask for the packet, 1 where it does, 2 for a reply. */
static __inline_always int wants(const struct trace_session *s, const struct trace_packet *p)
{
	if (s->until <= p->began || s->proto != p->proto)
		return 0;
	if ((!s->from || s->from == p->saddr) && (!s->to || s->to == p->daddr) && (!s->port || s->port == p->dport))
		return 1;
	if ((!s->from || s->from == p->daddr) && (!s->to || s->to == p->saddr) && (!s->port || s->port == p->sport))
		return 2;
	return 0;
}

/* trace_match reports whether a session asks for the packet, which is then at work. */
__noinline int trace_match(struct __sk_buff *skb, __u32 hook)
{
	__u32 zero = 0, i;
	struct trace_packet *p = map_lookup(&trace_packets, &zero);

	if (!p || !trace_read(skb, p))
		return false;
	p->began = ktime_get_ns();
	p->hook = hook;
	p->len = skb->len;
	/* In the map: the verifier would follow each set of bits that a variable can have. */
	p->sessions = p->replies = 0;
	for (i = 0; i < TRACE_SESSIONS; i++) {
		/* Linux 6.1 does not follow a counter whose address is taken. */
		__u32 slot = i;
		opaque(slot);
		struct trace_session *s = map_lookup(&trace_sessions, &slot);
		if (!s)
			break;
		int how = wants(s, p);
		if (how)
			p->sessions |= 1 << i;
		if (how == 2)
			p->replies |= 1 << i;
	}
	if (!p->sessions)
		return false;
	trace(ENTERED, 0, 0, 0, NO_RULE);
	return true;
}

/* tracing reports whether there is a session at all. */
static __inline_always bool tracing(void)
{
	__u32 zero = 0;
	__u64 *until = map_lookup(&trace_until, &zero);

	return until && *until;
}

/* begins is TOLD where somebody asks what becomes of the packet. */
static __inline_always __u32 begins(struct __sk_buff *skb, __u32 hook)
{
	return unlikely(tracing()) && trace_match(skb, hook) ? TOLD : 0;
}

#endif
