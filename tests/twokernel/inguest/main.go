// Command inguest is what the two-kernel tests run inside their guests.
//
// As /init it mounts what a kernel offers, loads the modules of /modules/order,
// and then does what the driver asks over the second serial port. It is also the
// internet behind the primary's egress, and what uses it (a static program; that
// of busybox fails where libc's name services are missing).
//
// usage: /init                     as process 1
//
//	inguest internet ADDR:PORT...   HTTP on port 80, and DNS on these addresses
//	inguest fetch URL               print the SHA-256 and the size of what is there
//	inguest lookup NAME             print the addresses of a name
//
// It is no part of the product: mknetd, mk-cni, mk-shim and mk-agent run as they
// are.
package main

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if os.Getpid() != 1 {
		if err := tool(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "inguest:", err)
			os.Exit(1)
		}
		return
	}
	err := boot()
	if err == nil {
		err = control()
	}
	// Process 1 must not return: the kernel would panic before the console is
	// written.
	fmt.Fprintln(os.Stderr, "init:", err)
	time.Sleep(time.Second)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// patience is how long a request may bring nothing.
const patience = time.Minute

func tool(args []string) error {
	switch {
	case len(args) > 1 && args[0] == "internet":
		return serveInternet(args[1:])
	case len(args) == 2 && args[0] == "fetch":
		return fetch(os.Stdout, args[1], patience)
	case len(args) == 2 && args[0] == "lookup":
		return lookup(os.Stdout, args[1], patience)
	}
	return errors.New("usage: inguest internet ADDR:PORT... | fetch URL | lookup NAME")
}
