// Package suite holds a plugin against what CNI 1.1.0 asks of it: 59 numbered
// items, each a Check that runs the plugin's binary as a runtime would, once for
// every version of the specification that it applies to. `go test` and the
// command in the folder above run the same table.
//
// The suite sees only what a runtime sees: environment, standard input, exit
// status, output, and the kernel objects of the private host it runs in. What
// cannot be seen from outside (how to stop the plugin's daemon, how to make a
// small address pool) a Driver knows.
package suite
