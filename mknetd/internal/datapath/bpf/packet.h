//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/* Reading packets: the IPv4 header, and the tuple that names a flow. */

#ifndef MKNET_PACKET_H
#define MKNET_PACKET_H

#include "kernel.h"

/*
 * ipv4 returns the IPv4 header of skb, NULL where there is none that can be read.
 * The pointer is good until the next helper that changes the packet.
 */
static __inline_always struct iphdr *ipv4(struct __sk_buff *skb)
{
	const __u32 need = ETH_HLEN + sizeof(struct iphdr);
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (unlikely(data + need > end)) {
		/* The header may lie in fragments of a non-linear packet. */
		if (skb_pull_data(skb, need))
			return NULL;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
		if (data + need > end)
			return NULL;
	}
	struct iphdr *ip = data + ETH_HLEN;
	if (unlikely(ip->version != 4 || ip->ihl < 5))
		return NULL;
	return ip;
}

struct tuple {
	__be32 saddr, daddr;
	__be16 sport, dport; /* ICMP queries: the identifier, in both */
	__u8 proto;
	bool fragment;	 /* any fragment, the first included */
	bool ports;	 /* sport and dport are known, or the protocol has none */
	bool begins;	 /* may be the first packet of a flow */
	bool icmp_error; /* quotes a packet of another flow */
	__u16 header;	 /* bytes of IP and transport header */
};

static __inline_always bool has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP ||
	       proto == IPPROTO_DCCP || proto == IPPROTO_UDPLITE;
}

/* ICMP types, RFC 792. */
enum {
	ICMP_ECHOREPLY = 0,
	ICMP_DEST_UNREACH = 3,
	ICMP_SOURCE_QUENCH = 4,
	ICMP_REDIRECT = 5,
	ICMP_ECHO = 8,
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETERPROB = 12,
	ICMP_TIMESTAMP = 13,
	ICMP_TIMESTAMPREPLY = 14,
};

#define TCP_SYN 0x02
#define TCP_ACK 0x10

/* transport reads the transport header at offset bytes into t. */
static __inline_always void transport(struct __sk_buff *skb, __u32 offset, struct tuple *t)
{
	__be16 h[7];

	if (t->proto == IPPROTO_TCP) {
		if (skb_load_bytes(skb, offset, h, 14))
			return;
		__u8 *b = (__u8 *)h;
		t->sport = h[0];
		t->dport = h[1];
		t->begins = (b[13] & (TCP_SYN | TCP_ACK)) == TCP_SYN;
		t->header += b[12] >> 4 << 2;
	} else if (has_ports(t->proto)) {
		if (skb_load_bytes(skb, offset, h, 4))
			return;
		t->sport = h[0];
		t->dport = h[1];
		t->begins = true;
		t->header += 8;
	} else if (t->proto == IPPROTO_ICMP) {
		if (skb_load_bytes(skb, offset, h, 8))
			return;
		switch (*(__u8 *)h) {
		case ICMP_ECHO:
		case ICMP_TIMESTAMP:
			t->begins = true;
			t->sport = t->dport = h[2];
			break;
		case ICMP_ECHOREPLY:
		case ICMP_TIMESTAMPREPLY:
			t->sport = t->dport = h[2];
			break;
		case ICMP_DEST_UNREACH:
		case ICMP_SOURCE_QUENCH:
		case ICMP_REDIRECT:
		case ICMP_TIME_EXCEEDED:
		case ICMP_PARAMETERPROB:
			t->icmp_error = true;
			break;
		}
	} else {
		t->begins = true;
	}
	t->ports = true;
}

/* parse fills t from the packet whose header ip is. It ends the life of ip. */
static __inline_always void parse(struct __sk_buff *skb, struct iphdr *ip, struct tuple *t)
{
	__u16 frag = ntohs(ip->frag_off);
	__u32 ip_len = ip->ihl * 4;

	*t = (struct tuple){
		.saddr = ip->saddr,
		.daddr = ip->daddr,
		.proto = ip->proto,
		.fragment = frag & (IP_MF | IP_OFFSET),
		.header = ip_len,
	};
	if (!(frag & IP_OFFSET))
		transport(skb, ETH_HLEN + ip_len, t);
}

/*
 * quoted fills q with the packet that the ICMP error t quotes (RFC 792: its IP
 * header and at least 8 bytes), and reports whether it could be read.
 */
static __inline_always bool quoted(struct __sk_buff *skb, const struct tuple *t, struct tuple *q)
{
	struct iphdr in;
	__u32 offset = ETH_HLEN + t->header + 8;
	__be16 h[4];

	if (skb_load_bytes(skb, offset, &in, sizeof(in)) || in.version != 4 || in.ihl < 5)
		return false;
	*q = (struct tuple){.saddr = in.saddr, .daddr = in.daddr, .proto = in.proto};
	if (ntohs(in.frag_off) & IP_OFFSET)
		return false;
	if (!has_ports(q->proto) && q->proto != IPPROTO_ICMP)
		return true;
	if (skb_load_bytes(skb, offset + in.ihl * 4, h, sizeof(h)))
		return false;
	if (q->proto == IPPROTO_ICMP) {
		q->sport = q->dport = h[2];
	} else {
		q->sport = h[0];
		q->dport = h[1];
	}
	return true;
}

#endif
