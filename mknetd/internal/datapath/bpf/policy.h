//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * What policy says of a packet at one enforcement point of one endpoint. The
 * verdict depends on the endpoint's address, the direction and the packet alone,
 * so that it is the same whichever program asks.
 */

#ifndef MKNET_POLICY_H
#define MKNET_POLICY_H

#include "classifier.h"
#include "conntrack.h"
#include "trace.h"

/* The part of a point that most packets need. */
struct attached {
	__u32 flags;
	__u64 egress, ingress; /* epochs */
};

static __inline_always __u32 attach_epoch(const struct attached *a, __u32 dir)
{
	__u64 egress = a->egress, ingress = a->ingress;

	/* Else the compiler computes an address of the stack, which the verifier refuses. */
	opaque(egress);
	opaque(ingress);
	return way(dir) == EGRESS ? egress : ingress;
}

/*
 * point_read fills a; false where no point can be read. The element may have been
 * given to another address while it was read.
 */
static __inline_always bool point_read(__be32 self, struct attached *a)
{
	for (int i = 0; i < 2; i++) {
		struct point *p = map_lookup(&policy_points, &self);
		if (!p)
			return false;
		__u32 back = once(p->back);
		a->flags = once(p->flags);
		a->egress = once(p->epoch[0]);
		a->ingress = once(p->epoch[1]);
		if (likely(once(p->address) == self && once(p->front) == back))
			return true;
	}
	a->flags = POINT_ATTACHED | POINT_CLOSED | EGRESS | INGRESS;
	return true;
}

static __inline_always __u32 identity_epoch(__be32 peer)
{
	struct identity *id = map_lookup(&policy_identity, &peer);

	if (!id)
		return 0;
	__u32 back = once(id->back), epoch = once(id->epoch);
	return once(id->address) == peer && once(id->front) == back ? epoch : 0;
}

/* tell tells the trace what a function with a direction has found. */
static __inline_always void tell(__u32 why, __be32 self, __u32 dir)
{
	if (unlikely(dir & TOLD))
		trace(why, self, dir, 0, NO_RULE);
}

/* evaluate is layers on one point; whether it was whole is for the caller to see. */
static __inline_always int evaluate(struct point *p, __be32 self, __u32 dir, __be32 peer, __u32 key)
{
	__u32 acl = once(p->acl);
	int verdict = NOT_ENFORCED, r;

	if (acl) {
		r = ask(acl << 8 | dir, peer, key, once(self));
		if (r & SLOT_MISSING)
			return -NO_SLOT;
		if (r & BROKEN)
			return -NO_TABLE;
		if (r & MATCHED ? !(r & ALLOWED) : r & RESTRICTS)
			return -ACL_DROP;
		verdict = ACL_PASS;
	}
	if (once(p->flags) & POINT_CLOSED)
		return -GROUP_DROP;
	__u32 restricts = 0, i;
	for (i = 0; i < MAX_GROUPS; i++) {
		__u32 group = once(p->group[i]);
		if (!group)
			break;
		r = ask(group << 8 | GROUP | dir, peer, key, once(self));
		if (r & SLOT_MISSING)
			return -NO_SLOT;
		if (r & BROKEN)
			return -NO_TABLE;
		if (r & MATCHED)
			return GROUP_PASS;
		restricts |= r & RESTRICTS;
	}
	if (restricts)
		return -GROUP_DROP;
	return i ? GROUP_PASS : verdict;
}

/*
 * layers evaluates what applies to the endpoint self in a direction, for a peer
 * and protocol << 16 | port. It returns a reason, negative where it is denied.
 */
__noinline int layers(__be32 self, __u32 dir, __be32 peer, __u32 key)
{
	for (int i = 0; i < 2; i++) {
		struct point *p = map_lookup(&policy_points, &self);
		if (!p)
			return -NO_ENDPOINT;
		__u32 back = once(p->back);
		int verdict = evaluate(p, self, dir, peer, key);
		if (likely(once(p->address) == self && once(p->front) == back))
			return verdict;
	}
	return -NO_ENDPOINT;
}

/* window_scale finds the option in a SYN's header (RFC 7323); from and to are offsets. */
__noinline int window_scale(struct __sk_buff *skb, __u32 from, __u32 to)
{
	__u8 o[3];

	for (int i = 0; i < 12 && from + 3 <= to; i++) {
		if (skb_load_bytes(skb, from, o, 3))
			break;
		if (o[0] == 0)
			break;
		if (o[0] == 1) {
			from++;
			continue;
		}
		if (o[0] == 3 && o[1] == 3)
			return o[2] < 14 ? o[2] : 14;
		if (o[1] < 2)
			break;
		from += o[1];
	}
	return NO_SCALE;
}

/* rules_port: the packet's port as rules see it. */
static __inline_always bool judged_by_port(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP;
}

static __inline_always __u32 rules_key(const struct ct_key *k, bool reply)
{
	__be16 port = reply ? k->sport : k->dport;

	return (__u32)k->proto << 16 | (judged_by_port(k->proto) ? ntohs(port) : 0);
}

static __inline_always __u32 transport_bytes(__u8 proto)
{
	switch (proto) {
	case IPPROTO_TCP:
		return 20;
	case IPPROTO_SCTP:
		return 12;
	case IPPROTO_UDP:
	case IPPROTO_ICMP:
		return 8;
	}
	return 0;
}

static __inline_always bool is_query(__u8 type)
{
	return type == ICMP_ECHO || type == ICMP_TIMESTAMP || type == ICMP_ECHOREPLY || type == ICMP_TIMESTAMPREPLY;
}

/*
 * read_packet fills k, but for the hook, and s. It returns 0 or the reason for
 * which nothing can be said. Lengths are those of the IP header: what the frame
 * has behind them is no part of the packet.
 */
static __inline_always int read_packet(struct __sk_buff *skb, struct ct_key *k, struct segment *s, __u32 *transport_at)
{
	struct iphdr ip;
	union {
		__u8 b[16];
		__be16 h[8];
		__be32 w[4];
	} t;

	if (skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return PARSE_DROP;
	__u16 frag = ntohs(ip.frag_off);
	__u32 header = ip.ihl * 4, total = ntohs(ip.tot_len), need = transport_bytes(ip.proto);
	if (!total) /* longer than 64 KiB: BIG TCP */
		total = skb->len - ETH_HLEN;
	k->saddr = ip.saddr;
	k->daddr = ip.daddr;
	k->proto = ip.proto;
	s->scale = NO_SCALE;
	*transport_at = ETH_HLEN + header;
	if (!need)
		return 0;
	struct frag_key fk = {.saddr = ip.saddr, .daddr = ip.daddr, .id = ip.id, .proto = ip.proto};
	if (unlikely(frag & IP_OFFSET)) {
		struct frag *f = map_lookup(&policy_fragments, &fk);
		if (!f || (long long)(ktime_get_coarse_ns() - f->seen) > (long long)(5 * SECOND))
			return NO_FRAGMENT;
		k->sport = f->sport;
		k->dport = f->dport;
		return 0;
	}
	if (total < header + need || skb_load_bytes(skb, ETH_HLEN + header, &t, need == 8 || need == 12 ? 8 : 16))
		return PARSE_DROP;
	if (ip.proto == IPPROTO_ICMP) {
		if (is_query(t.b[0])) {
			k->sport = k->dport = t.h[2];
			s->request = t.b[0] == ICMP_ECHO || t.b[0] == ICMP_TIMESTAMP;
		}
		s->error = t.b[0] == ICMP_DEST_UNREACH || t.b[0] == ICMP_TIME_EXCEEDED || t.b[0] == ICMP_PARAMETERPROB;
	} else {
		k->sport = t.h[0];
		k->dport = t.h[1];
	}
	if (ip.proto == IPPROTO_TCP) {
		__u32 bytes = t.b[12] >> 4 << 2;
		if (bytes < 20 || total < header + bytes)
			return PARSE_DROP;
		s->flags = t.b[13] & (TCP_SYN | TCP_ACK | TCP_FIN | TCP_RST);
		s->seq = __builtin_bswap32(t.w[1]);
		s->ack = __builtin_bswap32(t.w[2]);
		s->window = ntohs(t.h[7]);
		s->end = s->seq + (total - header - bytes) + (s->flags & TCP_FIN);
		if (unlikely(s->flags & TCP_SYN))
			s->scale = window_scale(skb, ETH_HLEN + header + 20, ETH_HLEN + header + bytes);
	}
	if (unlikely(frag & IP_MF)) {
		struct frag f = {.sport = k->sport, .dport = k->dport, .seen = ktime_get_coarse_ns()};
		map_update(&policy_fragments, &fk, &f, BPF_ANY);
	}
	return 0;
}

/*
 * related reports whether the ICMP error at offset bytes quotes a packet of a
 * flow that is live and was admitted under what applies now. The endpoint saw
 * that packet at its other hook.
 */
static __inline_always bool related(struct __sk_buff *skb, __u32 offset, __be32 self, __u32 dir, const struct attached *a)
{
	struct iphdr in;
	__be16 h[4];
	struct ct_key k = {.hook = EGRESS + INGRESS - way(dir)};

	if (skb_load_bytes(skb, offset + 8, &in, sizeof(in)) || in.version != 4 || in.ihl < 5 ||
	    ntohs(in.frag_off) & IP_OFFSET)
		return false;
	if ((way(dir) == INGRESS ? in.saddr : in.daddr) != self)
		return false;
	k.saddr = in.saddr;
	k.daddr = in.daddr;
	k.proto = in.proto;
	if (transport_bytes(in.proto)) {
		if (skb_load_bytes(skb, offset + 8 + in.ihl * 4, h, sizeof(h)))
			return false;
		if (in.proto != IPPROTO_ICMP) {
			k.sport = h[0];
			k.dport = h[1];
		} else if (is_query(*(__u8 *)h)) {
			k.sport = k.dport = h[2];
		}
	}
	struct ct *c = ct_find(&k, ktime_get_coarse_ns());
	if (!c)
		return false;
	bool out = (k.hook == EGRESS) != !!(c->flags & CT_REPLY);
	return c->attach_epoch == attach_epoch(a, out ? EGRESS : INGRESS) &&
	       c->peer_epoch == identity_epoch(way(dir) == INGRESS ? in.daddr : in.saddr);
}

/* judge_known is judge for a packet whose flow has the entry c. */
static __inline_always int judge_known(const struct ct_key *k, struct ct *c, const struct segment *s, __u64 time, __be32 self, __u32 told, __be32 peer, const struct attached *a)
{
	bool reply = c->flags & CT_REPLY;
	__u32 dir = reply ? EGRESS + INGRESS - k->hook : k->hook;
	__u32 attach = attach_epoch(a, dir), member = identity_epoch(peer);
	int how = CT_HIT;

	if (unlikely(c->attach_epoch != attach || c->peer_epoch != member)) {
		struct ct_key r;
		tell(CT_OLD, self, k->hook | told);
		int verdict = layers(self, dir | told, peer, rules_key(k, reply));

		if (c->flags & CT_PROBE && a->flags & POINT_PROBES)
			verdict = PROBE;
		if (verdict < 0) {
			/*
			 * The entries stay, with the epochs that make every further
			 * packet be judged by the direction in which the flow began.
			 * Else one that the other side has still to send would begin
			 * a flow of its own, and the removed one go on as its replies.
			 */
			reason(CT_OLD);
			return verdict;
		}
		ct_reverse(k, &r);
		struct ct *o = map_lookup(&policy_conntrack, &r);
		if (o) {
			o->attach_epoch = attach;
			o->peer_epoch = member;
		}
		c->attach_epoch = attach;
		c->peer_epoch = member;
		how = CT_OLD;
	}
	if (!(s->flags & TCP_RST))
		ct_refresh(k, c, time);
	if (k->proto == IPPROTO_TCP)
		ct_tcp(k, c, s);
	return how;
}

static __inline_always int judge_packet(struct __sk_buff *skb, __be32 self, __u32 dir, const struct attached *a)
{
	struct ct_key k = {};
	struct segment s = {};
	__u32 transport_at;
	int unreadable = read_packet(skb, &k, &s, &transport_at);

	if (unlikely(unreadable))
		return a->flags & way(dir) ? -unreadable : NOT_ENFORCED;
	k.hook = way(dir);
	if (unlikely(s.error) && related(skb, transport_at, self, dir, a))
		return RELATED;
	__be32 peer = way(dir) == EGRESS ? k.daddr : k.saddr;
	/* An error is of no flow itself; nor is what is not the endpoint's own. */
	if (unlikely(s.error || (way(dir) == EGRESS ? k.saddr : k.daddr) != self))
		return layers(self, dir, peer, rules_key(&k, false));

	__u64 time = ktime_get_coarse_ns();
	struct ct *c = ct_find(&k, time);
	if (likely(c && !ct_begins(c, &s)))
		return judge_known(&k, c, &s, time, self, dir & TOLD, peer, a);

	/* The epochs are older than what is evaluated, never newer. */
	__u32 attach = attach_epoch(a, dir), member = identity_epoch(peer);
	tell(CT_MISS, self, dir);
	int verdict = layers(self, dir, peer, rules_key(&k, false));
	bool probe = false;
	if (verdict < 0) {
		/* What the node itself sends came in by no link. */
		probe = way(dir) == INGRESS && a->flags & POINT_PROBES && !skb->ingress_ifindex;
		if (!probe)
			return verdict;
		verdict = PROBE;
	}
	if (s.flags & TCP_RST)
		return verdict;
	if (unlikely(!ct_admit(&k, &s, time, attach, member, probe))) {
		reason(CT_FULL);
		tell(CT_FULL, self, dir);
	}
	return verdict;
}

/*
 * judge returns the reason for which an IPv4 packet may pass the enforcement point
 * (self, dir), or the negative reason for which it may not. dir is EGRESS or
 * INGRESS, with TOLD where the trace is told.
 */
__noinline int judge(struct __sk_buff *skb, __be32 self, __u32 dir)
{
	struct attached a;

	if (!point_read(self, &a)) {
		tell(NO_ENDPOINT, self, dir);
		return NO_ENDPOINT;
	}
	if (!(a.flags & POINT_ATTACHED)) {
		tell(NOT_ENFORCED, self, dir);
		return NOT_ENFORCED;
	}
	int verdict = judge_packet(skb, self, dir, &a);
	__u32 why = verdict < 0 ? -verdict : verdict;
	reason(why);
	/* ask has told what ACLs say, and judge_known what is old. */
	if (why != ACL_PASS && why != ACL_DROP && why != CT_OLD)
		tell(why, self, dir);
	return verdict;
}

/*
 * judge_frame is judge for a frame that is neither ARP nor untagged IPv4.
 */
__noinline int judge_frame(__be32 self, __u32 dir)
{
	struct attached a;

	if (!point_read(self, &a) || !(a.flags & dir & (EGRESS | INGRESS)))
		return NOT_ENFORCED;
	reason(FRAME_DROP);
	return -FRAME_DROP;
}

#endif
