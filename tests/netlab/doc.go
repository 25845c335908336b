// Package netlab is the fixture of every test that creates kernel objects. It
// re-executes the test binary in network and mount namespaces of its own, so
// that no test ever touches the machine's network, and checks after each test
// that nothing was left behind.
//
//	func TestMain(m *testing.M) { netlab.Main(m) }
//
//	func TestX(t *testing.T) {
//		netlab.Clean(t)          // compares the private host before and after
//		pod := netlab.New(t)     // a network namespace of the test's own
//		pod.Run(t, "ip", "link") // a command inside it
//	}
//
// All tests of one binary share one private host (network namespace, /run, /sys,
// /var/lib/cni, /etc/cni). A test that needs a second host makes namespaces.
package netlab
