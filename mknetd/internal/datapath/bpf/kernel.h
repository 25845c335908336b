//go:build ignore

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */

/*
 * What the programs use of the kernel's own interface, written down here so that
 * they compile with clang alone: types, the context of a TC program, helper
 * numbers, packet headers. Names and numbers are those of
 * include/uapi/linux/{bpf,if_ether,ip,pkt_cls}.h; they never change.
 */

#ifndef MKNET_KERNEL_H
#define MKNET_KERNEL_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef int __s32;
typedef _Bool bool;

typedef __u16 __be16; /* in network byte order */
typedef __u32 __be32;

#define true 1
#define false 0
#define NULL ((void *)0)

#define SEC(name) __attribute__((section(name), used))
#define __inline_always inline __attribute__((always_inline))
#define __noinline __attribute__((noinline))
/* Hides from the compiler what a value may be. */
#define opaque(x) asm volatile("" : "+r"(x))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the objects are built for little-endian machines"
#endif
#define htons(x) ((__be16)__builtin_bswap16(x))
#define ntohs(x) ((__u16)__builtin_bswap16(x))

/* Definitions of maps, as BTF carries them. */
#define __uint(name, val) int(*name)[val]
#define __type(name, val) typeof(val) *name
#define __array(name, val) typeof(val) *name[]

enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_HASH_OF_MAPS = 13,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_F_NO_PREALLOC = 1,
	BPF_ANY = 0,
};

/* The context of a TC program: struct __sk_buff, as far as it is used. */
struct __sk_buff {
	__u32 len;
	__u32 pkt_type;
	__u32 mark;
	__u32 queue_mapping;
	__u32 protocol; /* __be16 */
	__u32 vlan_present;
	__u32 vlan_tci;
	__u32 vlan_proto;
	__u32 priority;
	__u32 ingress_ifindex;
	__u32 ifindex;
	__u32 tc_index;
	__u32 cb[5];
	__u32 hash;
	__u32 tc_classid;
	__u32 data;
	__u32 data_end;
	__u32 napi_id;
	__u32 family;
	__u32 remote_ip4;
	__u32 local_ip4;
	__u32 remote_ip6[4];
	__u32 local_ip6[4];
	__u32 remote_port;
	__u32 local_port;
	__u32 data_meta;
	__u64 flow_keys;
	__u64 tstamp;
	__u32 wire_len;
	__u32 gso_segs;
	__u64 sk;
	__u32 gso_size;
};

/* Returned by TC programs. NEXT goes on to whatever is attached after us. */
enum {
	NEXT = -1, /* TC_ACT_UNSPEC, TCX_NEXT */
	DROP = 2,  /* TC_ACT_SHOT, TCX_DROP */
};

static void *(*map_lookup)(void *map, const void *key) = (void *)1;
static long (*map_update)(void *map, const void *key, const void *value, __u64 flags) = (void *)2;
static long (*map_delete)(void *map, const void *key) = (void *)3;
static __u64 (*ktime_get_ns)(void) = (void *)5;
static long (*skb_store_bytes)(struct __sk_buff *skb, __u32 offset, const void *from, __u32 len, __u64 flags) = (void *)9;
static long (*redirect)(__u32 ifindex, __u64 flags) = (void *)23;
static long (*skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) = (void *)26;
static long (*skb_pull_data)(struct __sk_buff *skb, __u32 len) = (void *)39;
static long (*redirect_peer)(__u32 ifindex, __u64 flags) = (void *)155; /* Linux 5.10 */
static void *(*ringbuf_reserve)(void *map, __u64 size, __u64 flags) = (void *)131; /* Linux 5.8 */
static void (*ringbuf_submit)(void *data, __u64 flags) = (void *)132;
static __u64 (*ktime_get_coarse_ns)(void) = (void *)160;		/* Linux 5.11 */

#define ETH_ALEN 6
#define ETH_HLEN 14
#define ETH_P_IP 0x0800
#define ETH_P_ARP 0x0806
#define ETH_P_8021Q 0x8100
#define ETH_P_8021AD 0x88a8

struct ethhdr {
	__u8 dst[ETH_ALEN];
	__u8 src[ETH_ALEN];
	__be16 proto;
};

#define IP_MF 0x2000
#define IP_OFFSET 0x1fff

struct iphdr {
	__u8 ihl : 4;
	__u8 version : 4;
	__u8 tos;
	__be16 tot_len;
	__be16 id;
	__be16 frag_off;
	__u8 ttl;
	__u8 proto;
	__be16 check;
	__be32 saddr;
	__be32 daddr;
};

enum {
	IPPROTO_ICMP = 1,
	IPPROTO_TCP = 6,
	IPPROTO_UDP = 17,
	IPPROTO_DCCP = 33,
	IPPROTO_SCTP = 132,
	IPPROTO_UDPLITE = 136,
};

#endif
