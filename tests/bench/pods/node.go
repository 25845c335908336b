package pods

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"

	"mknet/tests/bench/side"
	"mknet/tests/netlab"
)

// Command is the first argument of a node's process.
const Command = "pods-node"

// Sample is what one measurement gave, by the name of the measure.
type Sample map[string]float64

// Measures are the names of what a sample holds, with their units. Processor time is
// that of both ends' processes, in whose system calls the kernel carries the packets.
var Measures = []struct{ Name, Unit string }{
	{"rr-cpu", "us"},       // per request and response of 1 byte over TCP
	{"rr", "1/s"},          // how many a second
	{"udp-cpu", "us"},      // per received packet of 64 bytes payload
	{"udp", "packets/s"},   //
	{"tcp-cpu", "s/Gbit"},  // of one flow
	{"tcp", "Gbit/s"},      //
	{"new-cpu", "us"},      // per datagram that begins a flow
	{"add", "ms"},          // median ADD of the other pods
	{"others", "pods"},     // how many there are
	{"setup-seconds", "s"}, // until all of them were there
}

// answer is a node's line on its standard output.
type answer struct {
	Sample Sample `json:"sample,omitempty"`
	Error  string `json:"error,omitempty"`
}

// node is the process in the private host.
type node struct {
	kind      Kind
	bin, dir  string
	self      string
	cni       *libcni.CNIConfig
	addresses []netip.Addr // of the two measured pods
	rounds    int          // measured so far
}

// Main is a node's process. It answers one line when its pods are there, and one for
// every line on its standard input: the length of each measure, and which.
func Main(args []string) int {
	fs := flag.NewFlagSet(Command, flag.ContinueOnError)
	kind := fs.String("kind", "", "one of Kinds or PolicyKinds")
	others := fs.Int("others", 1, "pods beside the measured two")
	bin := fs.String("bin", "", "folder of the programs and plugins")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	all := slices.Concat(Kinds, PolicyKinds) // those in both are the same
	i := slices.IndexFunc(all, func(k Kind) bool { return k.Name == *kind })
	if i < 0 {
		fmt.Fprintf(os.Stderr, "pods-node: no kind %q\n", *kind)
		return 2
	}
	status := 0
	netlab.Private(func() int {
		n := &node{kind: all[i], bin: *bin, dir: "/run/bench"}
		if err := n.serve(*others, os.Stdin, os.Stdout); err != nil {
			_ = json.NewEncoder(os.Stdout).Encode(answer{Error: fmt.Sprintf("%s: %v", *kind, err)})
			status = 1
		}
		return status
	})
	return status
}

func (n *node) serve(others int, in io.Reader, out io.Writer) error {
	var err error
	if n.self, err = os.Executable(); err != nil {
		return err
	}
	if err := os.MkdirAll(n.dir, 0o700); err != nil {
		return err
	}
	if err := surroundings(); err != nil {
		return err
	}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{n.bin}, filepath.Join(n.dir, "cni"), nil)
	if n.kind.start != nil {
		if err := n.kind.start(n); err != nil {
			return err
		}
	}
	begin := time.Now()
	took := make([]float64, 0, others+2)
	for i := range others + 2 {
		start := time.Now()
		addr, err := n.add(i)
		if err != nil {
			return err
		}
		took = append(took, float64(time.Since(start).Microseconds())/1000)
		if i < 2 {
			n.addresses = append(n.addresses, addr)
		}
	}
	if n.kind.after != nil {
		if err := n.kind.after(n); err != nil {
			return err
		}
	}
	slices.Sort(took)
	enc := json.NewEncoder(out)
	if err := enc.Encode(answer{Sample: Sample{"add": took[len(took)/2], "others": float64(others), "setup-seconds": time.Since(begin).Seconds()}}); err != nil {
		return err
	}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		length, names, _ := strings.Cut(lines.Text(), " ")
		window, err := time.ParseDuration(length)
		if err != nil {
			return err
		}
		s, err := n.measure(window, strings.Split(names, ","))
		if err != nil {
			return err
		}
		if err := enc.Encode(answer{Sample: s}); err != nil {
			return err
		}
	}
	return nil
}

// measurers measure between the first two pods.
var measurers = map[string]func(n *node, window time.Duration, s Sample) error{
	"rr": measureRequests, "udp": measureDatagrams, "tcp": measureStream, "new": measureFlows,
}

// measure runs the named measures once.
func (n *node) measure(window time.Duration, names []string) (Sample, error) {
	n.rounds++
	s := Sample{}
	for _, name := range names {
		measure, ok := measurers[name]
		if !ok {
			return s, fmt.Errorf("no measure %q", name)
		}
		if err := measure(n, window, s); err != nil {
			return s, fmt.Errorf("measure %s: %w", name, err)
		}
	}
	return s, nil
}

func measureRequests(n *node, window time.Duration, s Sample) error {
	var t side.Transactions
	var served side.Served
	if err := n.pair([]string{"once"}, &served, &t, "ask", "-to", n.addresses[1].String(), "-for", window.String()); err != nil {
		return err
	}
	s["rr"] = float64(t.Count) / window.Seconds()
	s["rr-cpu"] = 1e6 * (t.CPUSeconds + served.CPUSeconds) / float64(max(t.Count, 1))
	return nil
}

func measureDatagrams(n *node, window time.Duration, s Sample) error {
	var d side.Datagrams
	var sent side.Sent
	if err := n.pair([]string{"receive"}, &d, &sent, "send", "-to", n.addresses[1].String(), "-for", window.String()); err != nil {
		return err
	}
	s["udp"] = d.PerSecond
	s["udp-cpu"] = 1e6 * (d.CPUSeconds + sent.CPUSeconds) / float64(max(d.Count, 1))
	return nil
}

func measureStream(n *node, window time.Duration, s Sample) error {
	var f side.Stream
	var served side.Served
	if err := n.pair([]string{"once"}, &served, &f, "tcp", "-to", n.addresses[1].String(), "-for", window.String()); err != nil {
		return err
	}
	s["tcp"] = f.BitsPerSecond / 1e9
	s["tcp-cpu"] = (f.CPUSeconds + served.CPUSeconds) / max(f.Bits/1e9, 1e-9)
	return nil
}

// newFlows is how many flows one measure begins: few enough for every policer to
// remember those of as many rounds as its time-out lasts (30 to 120 s).
const newFlows = 10_000

// measureFlows counts by what was sent: the receiver's buffer holds all of it.
func measureFlows(n *node, _ time.Duration, s Sample) error {
	var d side.Datagrams
	var sent side.Sent
	port := strconv.Itoa(20_000 + n.rounds) // of this round alone, so that no flow is known
	if err := n.pair([]string{"receive", "-port", port, "-buffer", strconv.Itoa(64 << 20)}, &d, &sent,
		"flows", "-to", n.addresses[1].String(), "-port", port, "-count", strconv.Itoa(newFlows)); err != nil {
		return err
	}
	if d.Count < newFlows*9/10 {
		return fmt.Errorf("%d of %d datagrams arrived", d.Count, newFlows)
	}
	s["new-cpu"] = 1e6 * (d.CPUSeconds + sent.CPUSeconds) / newFlows
	return nil
}

// pair runs one process in the second pod, waits until it is ready, and one in the
// first, and reads what each of them says at its end.
func (n *node) pair(farArgs []string, far, near any, nearArgs ...string) error {
	server := n.command(1, farArgs...)
	out, err := server.StdoutPipe()
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return err
	}
	defer func() {
		_ = server.Process.Kill() // it has ended, unless the other failed
		_ = server.Wait()
	}()
	lines := bufio.NewReader(out)
	if _, err := lines.ReadString('\n'); err != nil {
		return fmt.Errorf("%s is not ready: %w", farArgs[0], err)
	}
	client := n.command(0, nearArgs...)
	said, err := client.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", nearArgs[0], err)
	}
	if err := json.Unmarshal(said, near); err != nil {
		return fmt.Errorf("%s said %q: %w", nearArgs[0], said, err)
	}
	if err := json.NewDecoder(lines).Decode(far); err != nil {
		return fmt.Errorf("%s: %w", farArgs[0], err)
	}
	return nil
}

// command is a side process in a measured pod. All run on the first processor: what
// one costs to wake another is not the network's.
func (n *node) command(pod int, args ...string) *exec.Cmd {
	full := append([]string{"netns", "exec", "p" + strconv.Itoa(pod), "taskset", "-c", "0", n.self, side.Command}, args...)
	cmd := exec.Command("ip", full...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}
