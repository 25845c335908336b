package link

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"time"

	"mknet/tests/bench/side"
)

// Measures are the names of what Measure returns, with their units. Not every link
// has all of them.
var Measures = []struct{ Name, Unit string }{
	{"tcp-out", "Gbit/s"},    // 1 flow, near to far
	{"tcp-in", "Gbit/s"},     // 1 flow, far to near
	{"tcp-out-4", "Gbit/s"},  // 4 flows
	{"tcp-in-4", "Gbit/s"},   //
	{"tcp", "Gbit/s"},        // mean of the four
	{"cpu", "s/Gbit"},        // of the carrying processes, over the four
	{"udp", "packets/s"},     // 64 bytes payload, received
	{"rtt", "us"},            // idle, median
	{"load-rtt", "us"},       // beside 4 flows, median
	{"load-rtt-p99", "us"},   //
	{"load-loss", "%"},       // pings without an answer
	{"load-tcp-4", "Gbit/s"}, // the flows beside them
	{"memory", "MiB"},        // largest resident set of one carrying process
}

// Sample is what one measurement of one link gave, by the name of the measure.
type Sample map[string]float64

// Options say how to measure.
type Options struct {
	Dir     string        // for sockets and logs, made by the caller
	Self    string        // binary that is a side process when asked
	Peers   string        // folder of the peers' binaries
	Profile string        // folder for CPU profiles of ours; empty means none
	Window  time.Duration // of each measure
}

// Measure makes a link, measures it and removes it. What was measured before an
// error is returned with it.
func Measure(k Link, o Options) (s Sample, err error) {
	l := &lab{dir: o.Dir, self: o.Self, peers: o.Peers, profile: o.Profile}
	defer func() {
		if e := l.down(); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", k.Name, e))
		}
	}()
	s = Sample{}
	if err := l.up(); err != nil {
		return s, fmt.Errorf("%s: %w", k.Name, err)
	}
	if err := k.start(l); err != nil {
		return s, fmt.Errorf("%s: start: %w", k.Name, err)
	}
	if err := l.start(&l.others, far, nil, o.Self, side.Command, "serve"); err != nil {
		return s, err
	}
	// The first connection waits until the link is there.
	steps := []func(Sample, time.Duration) error{l.warm, l.idle, l.streams, l.datagrams, l.loaded, l.memory}
	for _, step := range steps {
		if err := step(s, o.Window); err != nil {
			return s, fmt.Errorf("%s: %w", k.Name, errors.Join(err, l.alive()))
		}
	}
	return s, l.alive()
}

func (l *lab) warm(Sample, time.Duration) error {
	_, err := l.stream(1, false, 20*time.Millisecond)
	return err
}

func (l *lab) stream(flows int, reverse bool, window time.Duration) (got side.Stream, err error) {
	out, err := l.out(near, l.self, side.Command, "tcp", "-to", l.to, "-for", window.String(),
		"-flows", strconv.Itoa(flows), "-reverse="+strconv.FormatBool(reverse))
	if err == nil {
		err = json.Unmarshal([]byte(out), &got)
	}
	return got, err
}

func (l *lab) streams(s Sample, window time.Duration) error {
	before, err := l.cpuSeconds()
	if err != nil {
		return err
	}
	var bits, rates float64
	for _, m := range []struct {
		name    string
		flows   int
		reverse bool
	}{{"tcp-out", 1, false}, {"tcp-in", 1, true}, {"tcp-out-4", 4, false}, {"tcp-in-4", 4, true}} {
		got, err := l.stream(m.flows, m.reverse, window)
		if err != nil {
			return err
		}
		s[m.name] = got.BitsPerSecond / 1e9
		bits += got.Bits
		rates += got.BitsPerSecond / 4
	}
	after, err := l.cpuSeconds()
	if err != nil {
		return err
	}
	s["tcp"] = rates / 1e9
	if len(l.carrier) > 0 {
		s["cpu"] = (after - before) / (bits / 1e9)
	}
	return nil
}

func (l *lab) datagrams(s Sample, window time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), stepPatience)
	defer cancel()
	c := inside(far, l.self, side.Command, "receive")
	receiver := exec.CommandContext(ctx, c[0], c[1:]...)
	pipe, err := receiver.StdoutPipe()
	if err != nil {
		return err
	}
	if err := receiver.Start(); err != nil {
		return err
	}
	out := bufio.NewReader(pipe)
	var got side.Datagrams
	_, err = out.ReadString('\n') // it is ready
	if err == nil {
		err = l.in(near, l.self, side.Command, "send", "-to", l.to, "-for", window.String())
	}
	if err == nil {
		err = json.NewDecoder(out).Decode(&got)
	} else {
		cancel()
	}
	if err := errors.Join(err, receiver.Wait()); err != nil {
		return fmt.Errorf("receiver of datagrams: %w", err)
	}
	s["udp"] = got.PerSecond
	return nil
}

// idle pings every 2 ms.
func (l *lab) idle(s Sample, window time.Duration) error {
	if l.noPing {
		return nil
	}
	rtts, _, err := l.ping(int(window/(2*time.Millisecond)), 2*time.Millisecond)
	if err == nil {
		s["rtt"] = rtts[len(rtts)/2]
	}
	return err
}

// loaded pings every 5 ms beside four flows.
func (l *lab) loaded(s Sample, window time.Duration) error {
	if l.noPing {
		return nil
	}
	const begin = 500 * time.Millisecond // for the queues to fill
	type result struct {
		side.Stream
		err error
	}
	flows := make(chan result, 1)
	go func() {
		got, err := l.stream(4, false, begin+3*window)
		flows <- result{got, err}
	}()
	time.Sleep(begin)
	rtts, loss, err := l.ping(int(2*window/(5*time.Millisecond)), 5*time.Millisecond)
	got := <-flows
	if err := errors.Join(err, got.err); err != nil {
		return err
	}
	s["load-rtt"] = rtts[len(rtts)/2]
	s["load-rtt-p99"] = rtts[len(rtts)*99/100]
	s["load-loss"] = 100 * loss
	s["load-tcp-4"] = got.BitsPerSecond / 1e9
	return nil
}

var pingTime = regexp.MustCompile(`time=([\d.]+) ms`)

// ping returns the sorted round trips in microseconds and the share without answer.
func (l *lab) ping(count int, every time.Duration) (rtts []float64, loss float64, err error) {
	count = max(count, 10)
	// Its exit status is 1 when answers are missing, which is a result and no error.
	out, err := l.out(near, "ping", "-n", "-W", "1", "-c", strconv.Itoa(count), "-i", fmt.Sprint(every.Seconds()), l.to)
	for _, m := range pingTime.FindAllStringSubmatch(out, -1) {
		ms, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return nil, 0, err
		}
		rtts = append(rtts, 1000*ms)
	}
	if len(rtts) == 0 {
		return nil, 0, errors.Join(errors.New("no ping came back"), err)
	}
	slices.Sort(rtts)
	return rtts, 1 - float64(len(rtts))/float64(count), nil
}

func (l *lab) memory(s Sample, _ time.Duration) error {
	if len(l.carrier) == 0 {
		return nil
	}
	peak, err := l.peakBytes()
	s["memory"] = peak / (1 << 20)
	return err
}
