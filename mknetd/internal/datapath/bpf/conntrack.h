//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * Flows that policy has admitted. An admission writes two entries, one for each
 * direction, each under the hook at which this endpoint sees it; a hit needs the
 * epochs under which it was admitted. See spec/policy-datapath.md, "Conntrack".
 */

#ifndef MKNET_CONNTRACK_H
#define MKNET_CONNTRACK_H

#include "packet.h"
#include "policy_maps.h"

#define SECOND 1000000000ULL

#define TCP_FIN 0x01
#define TCP_RST 0x04

/* What is read of a packet besides its key. */
struct segment {
	__u32 seq, ack;
	__u32 end;    /* the number behind its last byte */
	__u16 window; /* as sent */
	__u8 flags;   /* of TCP; 0 where it is not known */
	__u8 scale;   /* of a SYN's window scale option; NO_SCALE */
	bool request; /* ICMP query that is no reply */
	bool error;   /* ICMP error: belongs to the flow that it quotes */
};

#define NO_SCALE 0xff

static __inline_always __u64 ttl(__u8 proto, __u8 state)
{
	switch (proto) {
	case IPPROTO_TCP:
		return state == CT_NEW ? 120 * SECOND : state == CT_ESTABLISHED ? 3600 * SECOND : 60 * SECOND;
	case IPPROTO_UDP:
		return 60 * SECOND;
	case IPPROTO_ICMP:
		return 30 * SECOND;
	}
	return 120 * SECOND;
}

/* ct_find returns the entry of k, NULL where there is none or it is too old. */
static __inline_always struct ct *ct_find(const struct ct_key *k, __u64 time)
{
	struct ct *c = map_lookup(&policy_conntrack, k);

	/* The clocks of two CPUs may differ by a tick: signed. */
	if (!c || (long long)(time - c->seen) > (long long)ttl(k->proto, c->state))
		return NULL;
	return c;
}

static __inline_always void ct_reverse(const struct ct_key *k, struct ct_key *r)
{
	*r = (struct ct_key){
		.saddr = k->daddr,
		.daddr = k->saddr,
		.sport = k->dport,
		.dport = k->sport,
		.proto = k->proto,
		.hook = EGRESS + INGRESS - k->hook,
		.scope = k->scope,
	};
}

static __inline_always void ct_delete(const struct ct_key *k, const struct ct_key *r)
{
	map_delete(&policy_conntrack, k);
	map_delete(&policy_conntrack, r);
}

/*
 * ct_begins reports whether the packet, whose entry is c, is the first of a new
 * flow with the same name, which is judged as one.
 */
static __inline_always bool ct_begins(const struct ct *c, const struct segment *s)
{
	if ((s->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN)
		return c->flags & CT_REPLY || c->state != CT_NEW;
	return s->request && c->flags & CT_REPLY;
}

/* ct_reset reports whether the receiver of a RST would take it; o is its direction's entry. */
static __inline_always bool ct_reset(const struct ct *o, const struct segment *s)
{
	if (o->flags & CT_ACK)
		return s->seq - o->ack < (o->window ?: 1);
	return s->flags & TCP_ACK && o->ack && s->ack == o->ack; /* answers a SYN */
}

static __inline_always void ct_acknowledge(struct ct *c, const struct segment *s)
{
	__u32 window = s->flags & TCP_SYN ? s->window : (__u32)s->window << (c->scale & 15);

	if (!(c->flags & CT_ACK) || (__s32)(s->ack - c->ack) > 0) {
		c->ack = s->ack;
		c->window = window;
		c->flags |= CT_ACK;
	} else if (s->ack == c->ack && c->window != window) {
		c->window = window;
	}
}

/* ct_tcp follows the connection; c is the entry of the packet's direction. */
static __inline_always void ct_tcp(const struct ct_key *k, struct ct *c, const struct segment *s)
{
	const __u8 changes = TCP_SYN | TCP_RST | TCP_FIN;
	struct ct_key r;
	struct ct *o;

	if (s->flags & TCP_ACK && !(s->flags & TCP_RST))
		ct_acknowledge(c, s);
	bool opens = c->state == CT_NEW && (s->flags & (TCP_ACK | TCP_SYN)) == TCP_ACK;
	bool closes = c->flags & CT_FIN;
	if (likely(!(s->flags & changes) && !opens && !closes))
		return;
	ct_reverse(k, &r);
	o = map_lookup(&policy_conntrack, &r);
	if (!o)
		return;
	if (s->flags & TCP_RST) {
		if (ct_reset(o, s))
			ct_delete(k, &r);
		return;
	}
	if (s->flags & TCP_SYN) {
		c->scale = s->scale == NO_SCALE ? 0 : s->scale;
		if (s->scale == NO_SCALE && s->flags & TCP_ACK)
			o->scale = 0; /* RFC 7323, section 2.2: both or none */
		if (!(s->flags & TCP_ACK) && !(c->flags & CT_ACK))
			c->ack = s->seq + 1;
		return;
	}
	if (opens)
		c->state = o->state = CT_ESTABLISHED;
	if (s->flags & TCP_FIN && !closes) {
		c->fin = s->end;
		c->flags |= CT_FIN;
		c->state = o->state = CT_FIN_WAIT;
	}
	/* Both have sent a FIN, and this acknowledges the other's: whose own came before is done. */
	if (closes && o->flags & CT_FIN && s->flags & TCP_ACK && (__s32)(s->ack - o->fin) >= 0 &&
	    o->flags & CT_ACK && (__s32)(o->ack - c->fin) >= 0)
		ct_delete(k, &r);
}

/* ct_refresh keeps both directions alive; written once a second at most. */
static __inline_always void ct_refresh(const struct ct_key *k, struct ct *c, __u64 time)
{
	struct ct_key r;

	if (likely((long long)(time - c->seen) < (long long)SECOND))
		return;
	c->seen = time;
	ct_reverse(k, &r);
	struct ct *o = map_lookup(&policy_conntrack, &r);
	if (o)
		o->seen = time;
}

/* ct_admit writes both entries and reports whether there was room. */
static __inline_always bool ct_admit(const struct ct_key *k, const struct segment *s, __u64 time, __u32 attach, __u32 peer, bool probe)
{
	struct ct c = {.seen = time, .attach_epoch = attach, .peer_epoch = peer};
	struct ct_key r;

	ct_reverse(k, &r);
	if (k->proto == IPPROTO_TCP) {
		c.state = (s->flags & (TCP_SYN | TCP_ACK)) == TCP_SYN ? CT_NEW : CT_ESTABLISHED;
		if (s->flags & TCP_FIN)
			c.state = CT_FIN_WAIT;
	}
	c.flags = CT_REPLY | (probe ? CT_PROBE : 0);
	if (map_update(&policy_conntrack, &r, &c, BPF_ANY))
		return false;
	c.flags &= CT_PROBE;
	if (k->proto == IPPROTO_TCP) {
		if (s->flags & TCP_ACK) {
			c.ack = s->ack;
			c.window = s->window;
			c.flags |= CT_ACK;
		} else if (s->flags & TCP_SYN) {
			c.ack = s->seq + 1;
		}
		if (s->flags & TCP_FIN) {
			c.fin = s->end;
			c.flags |= CT_FIN;
		}
		if (s->flags & TCP_SYN && s->scale != NO_SCALE)
			c.scale = s->scale;
	}
	if (map_update(&policy_conntrack, k, &c, BPF_ANY)) {
		map_delete(&policy_conntrack, &r);
		return false;
	}
	return true;
}

#endif
