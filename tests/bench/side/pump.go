package side

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
	"time"

	"mknet/shim/pump"
	"mknet/shim/transport"
	"mknet/shim/tun"
	wire "mknet/spec/pump"
)

// Modes of the pump process.
const (
	Naive  = "naive"  // pump.RunNaive
	Plain  = "plain"  // batched, no virtio-net header, one lane
	Single = "single" // virtio-net header, one lane
	Full   = "full"   // virtio-net header, two lanes
	Sealed = "sealed" // the same, sealed as shim/session does: AES-256-GCM
)

// MTUBytes is that of every link of the benchmark.
const MTUBytes = 1400

// carry is one end of a pump. It ends with SIGTERM.
func carry(args []string, out io.Writer) (err error) {
	fs := flag.NewFlagSet("pump", flag.ContinueOnError)
	name := fs.String("tun", "", "device, made and removed here")
	mode := fs.String("mode", Full, "what to run")
	socket := fs.String("socket", "", "path of the unix socket between the ends")
	listen := fs.Bool("listen", false, "listen instead of dial")
	profile := fs.String("profile", "", "write a CPU profile to this file")
	if err := fs.Parse(args); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	queues, err := open(*name, *mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tun.CloseAll(queues)) }()
	conns, err := connect(ctx, *mode, *socket, *listen, len(queues))
	if err != nil {
		return err
	}
	counters := new(pump.Counters)
	err = run(ctx, *mode, counters, queues, conns)
	var closed *pump.PeerClosedError
	polite := errors.As(err, &closed) && closed.Reason == wire.Shutdown // the other end was first
	if ctx.Err() == nil && !polite {
		return fmt.Errorf("pump ended early: %w", err)
	}
	return say(out, counters.Snapshot())
}

// open opens one queue for each lane that the mode wants.
func open(name, mode string) ([]*tun.Queue, error) {
	switch mode {
	case Naive, Plain:
		q, err := tun.OpenPlain(name, false)
		if err != nil {
			return nil, err
		}
		return []*tun.Queue{q}, nil
	case Single:
		return tun.AttachLanes(name, 1, true)
	case Full, Sealed:
		queues, err := tun.AttachLanes(name, wire.MaxLanes, true)
		if err == nil && len(queues) != wire.MaxLanes {
			// Silently measuring something else would be worse.
			err = errors.Join(tun.ErrNoSteering, tun.CloseAll(queues))
		}
		return queues, err
	}
	return nil, fmt.Errorf("mode %q: no such mode", mode)
}

// connect makes one connection for each lane, in the order of the lanes.
func connect(ctx context.Context, mode, socket string, listen bool, lanes int) ([]net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	address, err := transport.Parse("unix://" + socket)
	if err != nil {
		return nil, err
	}
	var next func() (net.Conn, error)
	switch {
	case listen:
		l, err := listener(ctx, mode, address, socket)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		next = l.Accept
	case mode == Naive: // with the buffers that a socket has
		next = func() (net.Conn, error) { return net.Dial("unix", socket) }
	default:
		next = func() (net.Conn, error) { return transport.Dial(ctx, address) }
	}
	conns := make([]net.Conn, lanes)
	for i := range conns {
		if conns[i], err = persist(ctx, next); err != nil {
			return nil, fmt.Errorf("lane %d: %w", i, err)
		}
	}
	return conns, nil
}

// listener is that of the agent, but the naive pump keeps the buffers that a socket
// has.
func listener(ctx context.Context, mode string, address transport.Address, socket string) (net.Listener, error) {
	if mode == Naive {
		return net.Listen("unix", socket)
	}
	return transport.Listen(ctx, address, transport.Options{})
}

// persist tries until it works: the other end may not be there yet.
func persist(ctx context.Context, try func() (net.Conn, error)) (net.Conn, error) {
	for {
		conn, err := try()
		if err == nil {
			return conn, nil
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func run(ctx context.Context, mode string, c *pump.Counters, queues []*tun.Queue, conns []net.Conn) error {
	if mode == Naive {
		return pump.RunNaive(ctx, c, queues[0], conns[0])
	}
	lanes := make([]pump.Lane, len(conns))
	for i, conn := range conns {
		lanes[i].Conn = conn
		if mode == Sealed {
			// One known key for all: it is the work of sealing that counts here.
			block, err := aes.NewCipher(make([]byte, 32))
			if err != nil {
				return err
			}
			aead, err := cipher.NewGCM(block)
			if err != nil {
				return err
			}
			lanes[i].Seal, lanes[i].Open = aead, aead
		}
	}
	offloads, err := queues[0].ProbeOffloads()
	if err != nil {
		return err
	}
	windows := transport.Windows(len(lanes), false)
	return pump.Run(ctx, pump.Config{
		MTUBytes: MTUBytes, LocalOffloads: offloads, PeerOffloads: offloads,
		Grant: windows, Granted: windows, Counters: c,
	}, queues, lanes)
}
