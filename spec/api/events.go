package api

import (
	"time"

	"mknet/spec/endpoint"
)

// EventKind says what an event is about.
type EventKind string

// The kinds.
const (
	EventDaemon   EventKind = "daemon"   // mknetd itself, or what all endpoints share
	EventEndpoint EventKind = "endpoint" // the life of an endpoint
	EventObject   EventKind = "object"   // a kernel object was made, repaired or removed
	EventLost     EventKind = "lost"     // the follower was too slow: details.events have been left out here
)

// What happened to a kernel object. What happens to endpoints and the daemon has
// the names that the log has.
const (
	ObjectMade     = "made"
	ObjectRepaired = "repaired"
	ObjectRemoved  = "removed"
)

// Event is one change of an endpoint's state or of a kernel object; each change
// has exactly one.
type Event struct {
	Instance   string              `json:"instance"` // of the daemon: Seq begins again with each
	Seq        uint64              `json:"seq"`      // from 1, without gaps; 0 for what was lost
	At         time.Time           `json:"at"`
	Kind       EventKind           `json:"kind"`
	What       string              `json:"what"`
	Endpoint   string              `json:"endpoint,omitempty"` // its attachment: network/container/interface
	Generation endpoint.Generation `json:"generation,omitzero"`
	State      endpoint.State      `json:"state,omitempty"` // of the endpoint, after the event
	Object     *ChangedObject      `json:"object,omitempty"`
	Peer       *endpoint.Process   `json:"peer,omitempty"` // who asked for it
	Details    map[string]string   `json:"details,omitempty"`
}

// ChangedObject names a kernel object, as endpoint.Fault does.
type ChangedObject struct {
	Kind  string `json:"kind"`
	Name  string `json:"name"`
	Where string `json:"where"`
}

// EventList is the answer to GET /v1/events: what the daemon still remembers.
type EventList struct {
	Instance string  `json:"instance"`
	Lost     uint64  `json:"lost"` // older ones that were asked for and are forgotten
	Events   []Event `json:"events"`
}

// EventsAfter is where to go on: after the last event that one has, of one
// instance. Another instance's daemon gives all that it has. The zero value asks
// for everything.
type EventsAfter struct {
	Instance string
	Seq      uint64
}
