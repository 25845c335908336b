package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf/ringbuf"

	"mknet/spec/policy"
)

// MaxTraces is how many traces run at once, TRACE_SESSIONS in bpf/trace.h.
const MaxTraces = 16

// ErrTraces is returned by Trace while MaxTraces run: end one, or wait for its end.
var ErrTraces = errors.New("as many traces run as there can be")

// traceQueue is how many events a trace may be behind its reader. The programs'
// own buffer has room for 4,000.
const traceQueue = 4096

// TraceFilter names a flow, both directions of it.
type TraceFilter struct {
	From, To netip.Addr // the zero value: any
	Protocol policy.Protocol
	Port     uint16 // of To; 0: any, or none
}

// TraceEvent is one step of one packet.
type TraceEvent struct {
	Began, At time.Duration // CLOCK_MONOTONIC; Began is the same for all events of one packet at one hook
	Hook      string        // the program
	// Point is the direction of the enforcement point at Endpoint, 0 where the
	// event is of none.
	Point    policy.Direction
	Endpoint netip.Addr // 0.0.0.0 where it is not known

	Source, Destination         netip.Addr
	SourcePort, DestinationPort uint16
	Protocol                    policy.Protocol
	TCPFlags                    uint8
	Reply                       bool // from To to From
	Bytes                       int  // of the frame

	Reason  policy.Reason
	Outcome Outcome // with reasons from 500 on
	Policy  uint32  // number of the policy that has decided; 0: none
	Rule    int     // its place in that policy's direction as compiled; -1: a default
}

// traceSession is struct trace_session.
type traceSession struct {
	Until    uint64 // CLOCK_MONOTONIC, ns
	From, To address
	Port     [2]byte
	Proto    uint16
	Zero     uint32
}

// traceEvent is struct trace_event.
type traceEvent struct {
	Began, At                   uint64
	Source, Destination         address
	SourcePort, DestinationPort [2]byte
	Sessions, Replies           uint16
	Proto, Hook, TCPFlags, Dir  uint8
	Len                         uint32
	Endpoint                    address
	Reason                      uint16
	Outcome, Zero               uint8
	Policy, Rule                uint32
}

// tracePacket is struct trace_packet.
type tracePacket struct {
	Began, Lost                 uint64
	Source, Destination         address
	SourcePort, DestinationPort [2]byte
	Sessions, Replies           uint16
	Proto, Hook, TCPFlags, Zero uint8
	Len                         uint32
}

// traceHooks are the programs by their number in bpf/trace.h.
var traceHooks = map[uint8]string{1: "from_container", 2: "to_container", 3: "from_child", 4: "to_child"}

// noRule is NO_RULE.
const noRule = 0xffff

// tracer is the traces of a Datapath.
type tracer struct {
	life sync.Mutex // held while a trace begins or ends, over that of the reader

	mu       sync.Mutex
	sessions [MaxTraces]*Trace
	reader   *ringbuf.Reader // while there is a session
	read     sync.WaitGroup
}

// Trace is one session. Its events come until Close, or until its time is over,
// when the programs cease by themselves, whether or not this process still lives.
type Trace struct {
	d      *Datapath
	slot   uint32
	want   traceSession
	began  uint64 // CLOCK_MONOTONIC, ns
	events chan TraceEvent
	missed uint64 // events that the queue had no room for; under tracer.mu
	before uint64 // what the programs had lost when it began
}

// Trace begins to tell what becomes of the packets of a flow, for a time. The
// caller closes it.
func (d *Datapath) Trace(f TraceFilter, ttl time.Duration) (*Trace, error) {
	t, err := d.newTrace(f, ttl)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	d.traces.life.Lock()
	defer d.traces.life.Unlock()
	if err := d.traces.begin(t); err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	return t, nil
}

func (d *Datapath) newTrace(f TraceFilter, ttl time.Duration) (*Trace, error) {
	t := &Trace{d: d, events: make(chan TraceEvent, traceQueue)}
	for _, end := range []struct {
		addr netip.Addr
		to   *address
	}{{f.From, &t.want.From}, {f.To, &t.want.To}} {
		if end.addr.IsValid() {
			var err error
			if *end.to, err = addressOf(end.addr); err != nil {
				return nil, err
			}
		}
	}
	binary.BigEndian.PutUint16(t.want.Port[:], f.Port)
	t.want.Proto = uint16(f.Protocol)
	now, err := monotonic()
	if err != nil {
		return nil, err
	}
	t.began, t.want.Until = now, now+uint64(ttl)
	t.before, err = d.traceLost()
	return t, err
}

// begin takes a slot. The caller holds life.
func (r *tracer) begin(t *Trace) error {
	free := -1
	for i := MaxTraces - 1; i >= 0; i-- {
		if r.sessions[i] == nil {
			free = i
		}
	}
	if free < 0 {
		return ErrTraces
	}
	if r.reader == nil {
		reader, err := ringbuf.NewReader(t.d.objects.TraceEvents)
		if err != nil {
			return fmt.Errorf("map trace_events: %w", err)
		}
		// What was left there, by a process that died, takes the room of what comes.
		var rec ringbuf.Record
		for reader.AvailableBytes() > 0 {
			if err := reader.ReadInto(&rec); err != nil {
				return errors.Join(fmt.Errorf("map trace_events: %w", err), reader.Close())
			}
		}
		r.reader = reader
		r.read.Go(func() { r.follow(reader) })
	}
	t.slot = uint32(free)
	r.mu.Lock()
	r.sessions[free] = t
	r.mu.Unlock()
	// A program that sees half of a write sees a session that has ended.
	silent := t.want
	silent.Until = 0
	err := t.d.objects.TraceSessions.Put(t.slot, silent)
	if err == nil {
		err = t.d.objects.TraceSessions.Put(t.slot, t.want)
	}
	if err == nil {
		err = r.announce(t.d)
	}
	if err != nil {
		return errors.Join(err, r.end(t))
	}
	return nil
}

// announce tells the programs until when somebody asks. The caller holds life.
func (r *tracer) announce(d *Datapath) error {
	until := uint64(0)
	for _, t := range r.sessions {
		if t != nil {
			until = max(until, t.want.Until)
		}
	}
	if err := d.objects.TraceUntil.Put(uint32(0), until); err != nil {
		return fmt.Errorf("map trace_until: %w", err)
	}
	return nil
}

// end gives the slot back; a trace that has none is left as it is. The caller holds
// life.
func (r *tracer) end(t *Trace) error {
	if r.sessions[t.slot] != t {
		return nil
	}
	r.mu.Lock()
	r.sessions[t.slot] = nil
	close(t.events)
	r.mu.Unlock()
	silent := t.want
	silent.Until = 0
	err := t.d.objects.TraceSessions.Put(t.slot, silent)
	err = errors.Join(err, r.announce(t.d))
	for _, other := range r.sessions {
		if other != nil {
			return err
		}
	}
	err = errors.Join(err, r.reader.Close())
	r.read.Wait()
	r.reader = nil
	return err
}

// follow passes events on until the reader is closed.
func (r *tracer) follow(reader *ringbuf.Reader) {
	var rec ringbuf.Record
	for {
		if err := reader.ReadInto(&rec); err != nil {
			return // it was closed; nothing can be wrong with a record that a program wrote
		}
		var ev traceEvent
		if _, err := binary.Decode(rec.RawSample, binary.LittleEndian, &ev); err == nil {
			r.pass(ev)
		}
	}
}

func (r *tracer) pass(ev traceEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, t := range r.sessions {
		// What an earlier session left in the buffer is of an earlier time.
		if t == nil || ev.Sessions>>i&1 == 0 || ev.Began < t.began {
			continue
		}
		select {
		case t.events <- ev.of(i):
		default:
			t.missed++
		}
	}
}

// of is the event as the session in a slot sees it.
func (ev traceEvent) of(slot int) TraceEvent {
	out := TraceEvent{
		Began: time.Duration(ev.Began), At: time.Duration(ev.At), Hook: traceHooks[ev.Hook],
		Point: policy.Direction(ev.Dir), Endpoint: netip.AddrFrom4(ev.Endpoint),
		Source: netip.AddrFrom4(ev.Source), Destination: netip.AddrFrom4(ev.Destination),
		SourcePort: binary.BigEndian.Uint16(ev.SourcePort[:]), DestinationPort: binary.BigEndian.Uint16(ev.DestinationPort[:]),
		Protocol: policy.Protocol(ev.Proto), TCPFlags: ev.TCPFlags, Reply: ev.Replies>>slot&1 != 0, Bytes: int(ev.Len),
		Reason: policy.Reason(ev.Reason), Outcome: Outcome(ev.Outcome), Policy: ev.Policy, Rule: int(ev.Rule),
	}
	if ev.Rule == noRule {
		out.Rule = -1
	}
	return out
}

// Clock is CLOCK_MONOTONIC, by which programs tell the time.
func Clock() (time.Duration, error) {
	now, err := monotonic()
	return time.Duration(now), err
}

// Events is where events come, in the order of each CPU. It is closed by Close.
func (t *Trace) Events() <-chan TraceEvent { return t.events }

// Lost is how many events found no room: in the queue of this trace, or, of all
// traces, in the programs' buffer.
func (t *Trace) Lost() (uint64, error) {
	t.d.traces.mu.Lock()
	missed := t.missed
	t.d.traces.mu.Unlock()
	now, err := t.d.traceLost()
	return missed + now - t.before, err
}

// Close ends the trace; again is success.
func (t *Trace) Close() error {
	t.d.traces.life.Lock()
	defer t.d.traces.life.Unlock()
	if err := t.d.traces.end(t); err != nil {
		return fmt.Errorf("end a trace: %w", err)
	}
	return nil
}

// traceLost is how many events programs had no room for since the maps were made.
func (d *Datapath) traceLost() (uint64, error) {
	var shares []tracePacket
	if err := d.objects.TracePackets.Lookup(uint32(0), &shares); err != nil {
		return 0, fmt.Errorf("map trace_packets: %w", err)
	}
	sum := uint64(0)
	for _, s := range shares {
		sum += s.Lost
	}
	return sum, nil
}

// forgetTraces ends what an earlier process has begun.
func (d *Datapath) forgetTraces() error {
	if err := d.objects.TraceUntil.Put(uint32(0), uint64(0)); err != nil {
		return fmt.Errorf("map trace_until: %w", err)
	}
	for i := range uint32(MaxTraces) {
		if err := d.objects.TraceSessions.Put(i, traceSession{}); err != nil {
			return fmt.Errorf("map trace_sessions: %w", err)
		}
	}
	return nil
}

// endTraces ends what this process has begun.
func (d *Datapath) endTraces() error {
	d.traces.life.Lock()
	defer d.traces.life.Unlock()
	var errs []error
	for _, t := range d.traces.sessions {
		if t != nil {
			errs = append(errs, d.traces.end(t))
		}
	}
	return errors.Join(errs...)
}
