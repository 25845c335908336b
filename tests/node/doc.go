// Package node runs mknet's real programs for end-to-end tests, inside netlab's
// private host: mknetd as a process, mk-cni as a runtime calls it, children with
// mk-agent, and mk-shim between them.
//
//	func TestMain(m *testing.M) { node.Main(m) }
//
//	func TestX(t *testing.T) {
//		n := node.New(t)                    // host, uplink, running mknetd
//		pod := netlab.New(t)
//		ep := n.Add(t, "c1", pod, "eth0")   // CNI ADD
//		child := n.Boot(t, ep, "boot-1")    // child, agent, shim; carries packets
//		...
//	}
//
// When a test ends, every endpoint must be gone or is deleted, the inventory must
// be clean, and netlab's comparison must find nothing left.
package node
