// Package mapdump reads the pinned maps of the data path for an operator: entries
// as typed fields, filtered. It opens the pins by itself, read-only (BPF_F_RDONLY),
// so that it works while no daemon runs, and it changes nothing. The layouts are
// those of mknetd/internal/datapath/bpf; a test there compares them with the BTF
// of the object.
package mapdump
