package suite

import (
	"maps"
	"path/filepath"
	"time"
)

// Conf is the configuration of one plugin as it arrives on standard input,
// without cniVersion and name.
type Conf map[string]any

// with returns a copy of c that also has the given keys.
func (c Conf) with(more Conf) Conf {
	out := maps.Clone(c)
	maps.Copy(out, more)
	return out
}

// meaningless is why a plugin cannot be asked something; the item is then
// reported as not applicable.
type meaningless string

func (m meaningless) Error() string { return string(m) }

// Driver knows one plugin: its configuration, and what to do to it that the
// specification has no word for. Methods that provoke return a meaningless error
// where the plugin has no such notion, and an undo that the suite calls at the
// end of the check.
type Driver interface {
	Name() string   // the column's title
	Plugin() string // path of the binary
	Start() error   // brings up what the plugin needs in the private host
	Stop() error    // ends what Start began
	Reset() error   // after a check that left something behind: as if just started

	Conf() Conf
	// Small is a configuration whose addresses are used up by one attachment.
	Small() (Conf, func() error, error)
	// Delegating is a configuration that delegates addresses to the IPAM plugin
	// of that type.
	Delegating(ipam string) (Conf, error)
	// StopDaemon stops what the plugin talks to; the undo starts it again.
	StopDaemon() (func() error, error)
	// LoseReservation makes the plugin's side forget the address of an attachment.
	LoseReservation(network, containerID string) error
	// Shaped returns a configuration and a runtimeConfig that ask for traffic
	// shaping, and a function that removes the shaping behind the plugin's back.
	Shaped() (Conf, map[string]any, func() error, error)
	// Degrade takes away the way out of the network: of an existing attachment,
	// or (nil) of those to come.
	Degrade(existing *Attachment) (func() error, error)
	// Jam makes the removal of one attachment fail; the undo lets it succeed.
	Jam(a Attachment) (func() error, error)
	// Unsupported is a configuration with a field that the plugin must refuse
	// with code 2, and the field's name and value as the message must have them.
	Unsupported() (conf Conf, runtimeConfig map[string]any, key, value string, err error)
}

// unlisting is a Driver whose plugin leaves links out of its results on purpose,
// and documents why. Item 53 lets exactly those pass.
type unlisting interface {
	Unlisted(link string) bool
}

func leftOut(d Driver, link string) bool {
	u, ok := d.(unlisting)
	return ok && u.Unlisted(link)
}

// settling is a Driver whose plugin is expected to leave nothing, so that waiting
// long costs nothing where all is well and a busy machine makes no failure. A
// plugin that is known to leave things is not waited for.
type settling interface {
	Settle() time.Duration
}

// base is a plugin that is nothing but a binary and a configuration.
type base struct {
	name, plugin string
	conf         Conf
}

// NewGeneric drives an unknown plugin with the configuration it is given. What
// needs knowledge of the plugin is not applicable.
func NewGeneric(plugin string, conf Conf) Driver {
	return &base{name: filepath.Base(plugin), plugin: plugin, conf: conf}
}

const unknown = meaningless("the suite does not know how to do this to an unknown plugin")

func (b *base) Name() string   { return b.name }
func (b *base) Plugin() string { return b.plugin }
func (b *base) Start() error   { return prime(b) }
func (b *base) Stop() error    { return nil }
func (b *base) Reset() error   { return prime(b) }
func (b *base) Conf() Conf     { return b.conf }

func (b *base) Small() (Conf, func() error, error)   { return nil, nil, unknown }
func (b *base) Delegating(string) (Conf, error)      { return nil, unknown }
func (b *base) StopDaemon() (func() error, error)    { return nil, meaningless("has no daemon") }
func (b *base) LoseReservation(string, string) error { return unknown }
func (b *base) Shaped() (Conf, map[string]any, func() error, error) {
	return nil, nil, nil, meaningless("shapes no traffic")
}
func (b *base) Degrade(*Attachment) (func() error, error) { return nil, unknown }
func (b *base) Jam(Attachment) (func() error, error)      { return nil, unknown }
func (b *base) Unsupported() (Conf, map[string]any, string, string, error) {
	return nil, nil, "", "", unknown
}
