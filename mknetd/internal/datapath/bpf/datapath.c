//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * The data path of workloads whose host end is a veth of this node.
 *
 *   from_container  TC ingress of a pod's host end: what the pod sends
 *   to_container    TC egress of a pod's host end: what the host stack sends it
 *   from_child      TC ingress of a child kernel's host end: judges only
 *   to_child        TC egress of a child kernel's host end: judges only
 *
 * Each of them asks policy.h about every packet of an endpoint.
 *
 * A packet from one pod of this node to another enters by from_container and
 * leaves by bpf_redirect_peer, which skips the destination's to_container:
 * from_container stands for both enforcement points there. bpf_redirect, its
 * substitute, runs to_container; such packets carry MARK_REDIRECTED so that they
 * are judged once on either way.
 */

#include "flow.h"
#include "maps.h"
#include "packet.h"
#include "policy.h"
#include "trace.h"

/* The helpers are open to programs under a GPL-compatible licence only. */
char _license[] SEC("license") = "Dual BSD/GPL";

/* Set at load: whether the kernel has bpf_redirect_peer. */
volatile const __u8 use_peer = 1;

/*
 * On a packet between our bpf_redirect and to_container, which takes it off.
 * A veth scrubs marks, so that no workload can set it.
 */
#define MARK_REDIRECTED 0x6d6b6e74

static __inline_always void count(__be32 addr, __u32 outcome, __u32 bytes)
{
	struct counters *c = map_lookup(&counts, &addr);

	if (likely(c)) {
		c->outcome[outcome].packets++;
		c->outcome[outcome].bytes += bytes;
	}
}

static __inline_always int drop(struct __sk_buff *skb, __be32 addr, __u32 outcome)
{
	count(addr, outcome, skb->len);
	return DROP;
}

static __inline_always int pass(struct __sk_buff *skb, __be32 addr, __u32 outcome)
{
	count(addr, outcome, skb->len);
	return NEXT;
}

/* ends tells the trace what became of the packet. */
static __inline_always void ends(__u32 why, __be32 addr, __u32 outcome)
{
	if (unlikely(tracing()))
		trace(why | outcome << 16, addr, 0, 0, NO_RULE);
}

/* owner returns the endpoint of the link, by the link alone, and its address. */
static __inline_always struct endpoint *owner(struct __sk_buff *skb, __be32 *addr)
{
	__u32 ifindex = skb->ifindex;
	struct attachment *a = map_lookup(&attachments, &ifindex);

	if (!a)
		return NULL;
	*addr = a->addr;
	struct endpoint *ep = map_lookup(&endpoints, addr);
	return ep && ep->ifindex == ifindex ? ep : NULL;
}

static __inline_always bool same_mac(const __u8 *a, const __u8 *b)
{
	const __u16 *x = (const void *)a, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

static __inline_always void copy_mac(void *to, const void *from)
{
	__u16 *x = to;
	const __u16 *y = from;

	x[0] = y[0];
	x[1] = y[1];
	x[2] = y[2];
}

/* tagged: also a tag that the device did not take off the frame. */
static __inline_always bool tagged(struct __sk_buff *skb)
{
	return skb->vlan_present || skb->protocol == htons(ETH_P_8021Q) ||
	       skb->protocol == htons(ETH_P_8021AD);
}

/* other settles a frame that is neither IPv4 nor ARP, or that is tagged. */
static __attribute__((noinline)) int other(struct __sk_buff *skb, __u32 dir)
{
	__be32 addr = 0;
	struct endpoint *ep = owner(skb, &addr);

	if (!ep)
		return drop(skb, 0, DROP_UNKNOWN);
	if (ep->flags & EP_PASS_OTHER && judge_frame(addr, dir) > 0)
		return pass(skb, addr, OTHER);
	return drop(skb, addr, tagged(skb) ? DROP_VLAN : DROP_OTHER);
}

/* denied settles a packet that policy refuses, with judge's answer. */
static __inline_always int denied(struct __sk_buff *skb, __be32 addr, int verdict)
{
	__u32 outcome = verdict == -ACL_DROP ? DROP_ACL : verdict == -GROUP_DROP ? DROP_GROUP : DROP_POLICY;

	ends(DROPPED, addr, outcome);
	return drop(skb, addr, outcome);
}

/* not_own settles a packet with a source that is not the link's endpoint. */
static __attribute__((noinline)) int not_own(struct __sk_buff *skb)
{
	__be32 addr = 0;
	__u32 outcome = owner(skb, &addr) ? DROP_ADDRESS : DROP_UNKNOWN;

	ends(DROPPED, addr, outcome);
	return drop(skb, addr, outcome);
}

/* malformed settles a packet without an IPv4 header that can be read. */
static __attribute__((noinline)) int malformed(struct __sk_buff *skb)
{
	__be32 addr = 0;

	if (!owner(skb, &addr))
		return drop(skb, 0, DROP_UNKNOWN);
	return drop(skb, addr, DROP_HEADER);
}

/* ARP for IPv4 over Ethernet, RFC 826. Fields of 2 bytes, for alignment. */
struct arp {
	__be16 hw, proto, lengths, op;
	__be16 sender_mac[3], sender[2], target_mac[3], target[2];
};

#define ARP_REQUEST 1
#define ARP_REPLY 2

static __inline_always __be32 arp_addr(const __be16 *a)
{
	return (__be32)a[1] << 16 | a[0];
}

/*
 * arp answers a request for the gateway with the host end's address. What else a
 * pod says for itself (its answers to the host, its probes for duplicates) goes
 * to the host stack; what it says for others is dropped.
 */
static __attribute__((noinline)) int arp(struct __sk_buff *skb)
{
	__be32 addr = 0;
	struct endpoint *ep = owner(skb, &addr);
	struct {
		__be16 dst[3], src[3], type;
		struct arp a;
	} f;

	if (!ep)
		return drop(skb, 0, DROP_UNKNOWN);
	if (skb_load_bytes(skb, 0, &f, sizeof(f)) || f.a.hw != htons(1) ||
	    f.a.proto != htons(ETH_P_IP) || f.a.lengths != htons(0x0604))
		return drop(skb, addr, DROP_HEADER);
	if (!same_mac((void *)f.src, ep->pod_mac) || !same_mac((void *)f.a.sender_mac, ep->pod_mac))
		return drop(skb, addr, DROP_MAC);
	__be32 sender = arp_addr(f.a.sender);
	if (sender && sender != addr)
		return drop(skb, addr, DROP_ADDRESS);
	if (f.a.op != htons(ARP_REQUEST) || arp_addr(f.a.target) != ep->gateway || !sender)
		return pass(skb, addr, STACK);

	__be16 gateway[2] = {f.a.target[0], f.a.target[1]};
	f.a.op = htons(ARP_REPLY);
	copy_mac(f.dst, ep->pod_mac);
	copy_mac(f.src, ep->host_mac);
	copy_mac(f.a.target_mac, ep->pod_mac);
	f.a.target[0] = f.a.sender[0];
	f.a.target[1] = f.a.sender[1];
	copy_mac(f.a.sender_mac, ep->host_mac);
	f.a.sender[0] = gateway[0];
	f.a.sender[1] = gateway[1];
	if (skb_store_bytes(skb, 0, &f, sizeof(f), 0))
		return drop(skb, addr, DROP_HEADER);
	count(addr, ARP, skb->len);
	skb->mark = MARK_REDIRECTED;
	return redirect(skb->ifindex, 0);
}

/* too_long: the packet, or a segment that it will be cut into, exceeds the MTU. */
static __inline_always bool too_long(struct __sk_buff *skb, const struct tuple *t, __u32 mtu)
{
	__u32 gso_size = skb->gso_size;

	return (gso_size ? gso_size + t->header : skb->len - ETH_HLEN) > mtu;
}

/* What is rewritten in a redirected packet: Ethernet and the IP header's start. */
struct rewrite {
	__u16 align;
	__be16 dst[3], src[3], type;
	__be16 ip[4];
	__u8 ttl, proto;
	__u16 check;
};

/* to_pod sends the packet, whose header ip is, to a pod of this node. */
static __inline_always int to_pod(struct __sk_buff *skb, __be32 saddr, const struct endpoint *dst)
{
	struct iphdr *ip = ipv4(skb);
	struct rewrite w;

	if (!ip)
		return drop(skb, saddr, DROP_HEADER);
	const __be16 *h = (void *)ip;
	copy_mac(w.dst, dst->pod_mac);
	copy_mac(w.src, dst->host_mac);
	w.type = htons(ETH_P_IP);
	w.ip[0] = h[0];
	w.ip[1] = h[1];
	w.ip[2] = h[2];
	w.ip[3] = h[3];
	w.ttl = ip->ttl - 1;
	w.proto = ip->proto;
	/* RFC 1141: the high byte of one 16-bit word went down by one. */
	__u32 sum = (__u32)ip->check + htons(0x0100);
	w.check = sum + (sum >= 0xffff);
	/* The sum over the whole header stays what it was: nothing to recompute. */
	if (skb_store_bytes(skb, 0, w.dst, sizeof(w) - 2, 0))
		return drop(skb, saddr, DROP_HEADER);
	if (use_peer) {
		ends(REDIRECTED_PEER, saddr, PEER);
		count(saddr, PEER, skb->len);
		return redirect_peer(dst->ifindex, 0);
	}
	ends(REDIRECTED, saddr, REDIRECT);
	count(saddr, REDIRECT, skb->len);
	skb->mark = MARK_REDIRECTED;
	return redirect(dst->ifindex, 0);
}

SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct tuple t;

	if (unlikely(skb->vlan_present || skb->protocol != htons(ETH_P_IP))) {
		if (!skb->vlan_present && skb->protocol == htons(ETH_P_ARP))
			return arp(skb);
		return other(skb, EGRESS);
	}
	struct iphdr *ip = ipv4(skb);
	if (unlikely(!ip))
		return malformed(skb);

	__be32 saddr = ip->saddr, daddr = ip->daddr;
	__u32 told = begins(skb, FROM_CONTAINER);
	struct endpoint *src = map_lookup(&endpoints, &saddr);
	if (unlikely(!src || src->ifindex != skb->ifindex))
		return not_own(skb);
	struct ethhdr *eth = (void *)ip - ETH_HLEN;
	if (unlikely(!same_mac(eth->src, src->pod_mac))) {
		ends(DROPPED, saddr, DROP_MAC);
		return drop(skb, saddr, DROP_MAC);
	}
	int verdict = judge(skb, saddr, EGRESS | told);
	if (unlikely(verdict < 0))
		return denied(skb, saddr, verdict);

	/*
	 * To the host stack: what is not for a pod of this node; what the pod sends
	 * to itself (hairpin); frames for another station; and what only a router
	 * can settle: options, fragments (its conntrack reassembles them), a TTL
	 * that ends here, a packet that does not fit.
	 */
	struct endpoint *dst = map_lookup(&endpoints, &daddr);
	if (!dst || daddr == saddr || (dst->flags | src->flags) & EP_STACK_ONLY ||
	    !same_mac(eth->dst, src->host_mac) || ip->ihl != 5 || ip->ttl <= 1)
		goto stack;
	parse(skb, ip, &t);
	if (t.fragment || !t.ports || too_long(skb, &t, dst->mtu) || !flow_redirects(skb, &t))
		goto stack;
	/* to_container does not see it, or sees the mark. told is asked again: no room to keep it. */
	verdict = judge(skb, daddr, INGRESS | (unlikely(tracing()) ? TOLD : 0));
	if (unlikely(verdict < 0))
		return denied(skb, daddr, verdict);
	return to_pod(skb, saddr, dst);
stack:
	ends(TO_STACK, saddr, STACK);
	return pass(skb, saddr, STACK);
}

SEC("tc")
int to_container(struct __sk_buff *skb)
{
	struct tuple t;

	if (skb->mark == MARK_REDIRECTED) {
		skb->mark = 0;
		return NEXT;
	}
	if (unlikely(skb->vlan_present || skb->protocol != htons(ETH_P_IP))) {
		if (!skb->vlan_present && skb->protocol == htons(ETH_P_ARP))
			return NEXT;
		return other(skb, INGRESS);
	}
	struct iphdr *ip = ipv4(skb);
	if (unlikely(!ip))
		return malformed(skb);

	/* What the host routes to the link may be for more than the endpoint's address. */
	__be32 saddr = ip->saddr, addr = ip->daddr;
	__u32 told = begins(skb, TO_CONTAINER);
	struct endpoint *dst = map_lookup(&endpoints, &addr);
	if (unlikely(!dst || dst->ifindex != skb->ifindex)) {
		dst = owner(skb, &addr);
		if (!dst) {
			ends(DROPPED, 0, DROP_UNKNOWN);
			return drop(skb, 0, DROP_UNKNOWN);
		}
	}
	int verdict = judge(skb, addr, INGRESS | told);
	if (unlikely(verdict < 0))
		return denied(skb, addr, verdict);
	/* Only a reply to an endpoint of this node could be redirected. */
	if (map_lookup(&endpoints, &saddr)) {
		parse(skb, ip, &t);
		flow_delivered(&t);
	}
	ends(TO_ENDPOINT, addr, DELIVERED);
	return pass(skb, addr, DELIVERED);
}

/*
 * child judges what passes a child's host end, on its way (dir). Links and
 * addresses are the endpoint's by its firewall chain, not by these programs.
 */
static __inline_always int child(struct __sk_buff *skb, __u32 dir, __u32 outcome)
{
	__be32 addr = 0;
	int verdict;

	if (!owner(skb, &addr))
		return NEXT;
	if (unlikely(skb->vlan_present || skb->protocol != htons(ETH_P_IP))) {
		if (!skb->vlan_present && skb->protocol == htons(ETH_P_ARP))
			return pass(skb, addr, outcome);
		if (judge_frame(addr, dir) < 0)
			return drop(skb, addr, tagged(skb) ? DROP_VLAN : DROP_OTHER);
		return pass(skb, addr, outcome);
	}
	verdict = judge(skb, addr, dir | begins(skb, dir == EGRESS ? FROM_CHILD : TO_CHILD));
	if (unlikely(verdict < 0))
		return denied(skb, addr, verdict);
	ends(dir == EGRESS ? TO_STACK : TO_ENDPOINT, addr, outcome);
	return pass(skb, addr, outcome);
}

SEC("tc")
int from_child(struct __sk_buff *skb)
{
	return child(skb, EGRESS, STACK);
}

SEC("tc")
int to_child(struct __sk_buff *skb)
{
	return child(skb, INGRESS, DELIVERED);
}
