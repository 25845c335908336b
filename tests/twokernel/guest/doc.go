// Package guest makes and runs the virtual machines of the two-kernel tests:
// Debian's cloud kernel, an initramfs of its modules, busybox, the machine's own
// network tools and mknet's programs, QEMU without KVM, and a serial line over
// which the driver runs commands inside (mknet/tests/twokernel/wire).
package guest
