package doctor

// Checks is the table of all checks, in the order in which they are run.
func Checks() []Check {
	return []Check{
		{"config", "the configuration file is valid", checkConfig},
		{"daemon", "mknetd answers on its socket", checkDaemon},
		{"version", "mknetd that runs is the one that is installed", checkVersion},
		{"health", "mknetd would accept an ADD", checkHealth},
		{"socket", "the socket belongs to root and nobody else can put one in its place", checkSocket},
		{"folders", "the folders of records and deferred DELs are root's, and have room", checkFolders},
		{"privileges", "this process may look", checkPrivileges},
		{"kernel", "the kernel is new enough", checkKernel},
		{"tun", "/dev/net/tun is there, with virtio-net headers and several queues", checkTUN},
		{"bpf", "BPF programs for ordinary pods can be loaded and pinned", checkBPF},
		{"clock", "the wall clock is plausible and kept", checkClock},
		{"conntrack", "connection tracking can be read and has room", checkConntrack},
		{"iptables", "the programs of the flavour in use are there, and the other flavour holds no rules", checkIPTables},
		{"base-chains", "no base chain of somebody else overrules what mknet accepts", checkBaseChains},
		{"forwarding", "the egress forwards", checkForwarding},
		{"rp-filter", "the reverse path filter of the egress suits its routes", checkRPFilter},
		{"overlaps", "no route or address of the host lies in a pool", checkOverlaps},
		{"pools", "the pools have addresses left", checkPools},
		{"deferred-dels", "no deferred DEL waits", checkDeferred},
		{"objects", "kernel and records agree: nothing orphaned, missing or altered", checkObjects},
		{"metrics", "the metrics listener answers where one is configured", checkMetrics},
		{"cni-active", "the network that runtimes load first is mknet's", checkCNIActive},
		{"cni-ignored", "no configuration of mknet is left unused", checkCNIIgnored},
		{"cni-injected", "no plugin is added to mknet's network from a folder", checkCNIInjected},
		{"cni-binaries", "every plugin that the network names is installed", checkCNIBinaries},
		{"cni-check", "runtimes may run CHECK", checkCNICheck},
		{"cni-socket", "mk-cni asks the daemon that this configuration means, and comes first", checkCNISocket},
	}
}
