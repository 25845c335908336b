package suite

// podPool is what mknetd gives pods addresses from.
const podPool = "10.91.0.0/16"

// NewMkPods drives this project's plugin in veth mode, whose pods get their addresses
// from mknetd's pool or, where an item asks for it, from an IPAM plugin.
func NewMkPods(plugin, daemon string) Driver {
	return &mkcni{base: base{name: "mk-cni veth", plugin: plugin}, daemon: daemon, pool: podPool, pods: true}
}

// jamPod: a pod has no chain of its own that something could refer to, and no other
// object whose removal an onlooker can hinder.
func (m *mkcni) jamPod(Attachment) (func() error, error) {
	return nil, meaningless("nobody outside can hinder the removal of a pod's objects")
}
