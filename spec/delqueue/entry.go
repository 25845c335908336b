package delqueue

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Limits of the queue.
const (
	// MaxEntryBytes bounds one file: two identifiers of 128 bytes, an endpoint
	// address of MaxDaemonBytes, and the fixed fields, with room to spare.
	MaxEntryBytes  = 2048
	MaxDaemonBytes = 512
	// MaxEntries bounds the folder: twice the endpoints of the default pool, so
	// that a whole node can be torn down while mknetd is away.
	MaxEntries = 32768
)

// unknownTag stands for the generation in names and files where none is known.
const unknownTag = "unknown"

// formatVersion is the "v" of every entry.
const formatVersion = 1

// Entry is one deferred DEL.
type Entry struct {
	endpoint.Attachment
	Generation endpoint.Generation // zero: unknown
	BootID     string              // of the boot in which it was queued
	Cookie     uint64              // SO_NETNS_COOKIE of the endpoint's namespace; 0: unknown
	Daemon     string              // the mknetd it was meant for: "unix:///run/mknetd.sock"
	QueuedAt   time.Time           // wall clock; an unknown generation protects what is younger
	SinceBoot  time.Duration       // the same on CLOCK_BOOTTIME, nanoseconds; 0: not known
}

// wireEntry is the JSON form.
type wireEntry struct {
	V           int       `json:"v"`
	Network     string    `json:"network"`
	ContainerID string    `json:"containerID"`
	IfName      string    `json:"ifName"`
	Generation  string    `json:"generation"` // 32 hex digits or "unknown"
	BootID      string    `json:"bootID"`
	Cookie      uint64    `json:"netnsCookie,string,omitempty"`
	Daemon      string    `json:"daemon"`
	QueuedAt    time.Time `json:"queuedAt"`
	SinceBoot   int64     `json:"sinceBoot,omitempty"`
}

// Validate checks every field.
func (e Entry) Validate() error {
	if err := e.Attachment.Validate(); err != nil {
		return err
	}
	switch {
	case !validBootID(e.BootID):
		return fmt.Errorf("boot ID %.64q: must be a UUID as /proc/sys/kernel/random/boot_id has it", e.BootID)
	case e.Daemon == "" || len(e.Daemon) > MaxDaemonBytes || strings.ContainsFunc(e.Daemon, func(r rune) bool { return r <= ' ' || r > '~' }):
		return fmt.Errorf("daemon %.64q: must be 1 to %d printable characters", e.Daemon, MaxDaemonBytes)
	case e.QueuedAt.Year() < 1970 || e.QueuedAt.Year() > 9999:
		return fmt.Errorf("queuedAt %d: year is out of range", e.QueuedAt.Year())
	case e.SinceBoot < 0:
		return fmt.Errorf("sinceBoot %d: is before the boot", e.SinceBoot)
	}
	return nil
}

func validBootID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i, c := range []byte(s) {
		switch {
		case i == 8 || i == 13 || i == 18 || i == 23:
			if c != '-' {
				return false
			}
		case (c < '0' || c > '9') && (c < 'a' || c > 'f'):
			return false
		}
	}
	return true
}

// Name is the entry's file name.
func (e Entry) Name() string {
	tag := unknownTag
	if !e.Generation.IsZero() {
		tag = e.Generation.String()
	}
	return attachmentKey(e.Attachment) + "-" + tag
}

func attachmentKey(a endpoint.Attachment) string {
	sum := sha256.Sum256([]byte(a.Network + "\x00" + a.ContainerID + "\x00" + a.IfName))
	return hex.EncodeToString(sum[:16])
}

// Obsolete reports whether there can be nothing left to delete: the entry knows no
// generation and is from an earlier boot, whose namespaces and links are gone and
// whose records mknetd releases by itself.
func (e Entry) Obsolete(bootID string) bool {
	return e.Generation.IsZero() && e.BootID != bootID
}

// DeleteRequest is the request that replays an entry whose generation is unknown;
// an entry with a generation is DELETE /v1/endpoints/{generation}.
func (e Entry) DeleteRequest() api.DeleteRequest {
	req := api.DeleteRequest{Selector: api.Selector{Generation: e.Generation, Attachment: e.Attachment}}
	if e.Generation.IsZero() {
		req.NotAfter = &e.QueuedAt
		if e.SinceBoot > 0 {
			req.NotAfterBoot = &endpoint.Moment{BootID: e.BootID, SinceBoot: e.SinceBoot}
		}
	}
	if e.Cookie != 0 {
		req.Namespace = &endpoint.Namespace{BootID: e.BootID, Cookie: e.Cookie}
	}
	return req
}

// Finished reports whether a replayed DEL with this outcome is done with: it
// worked, or what it meant is not there any more. Every other error keeps the
// entry.
func Finished(err error) bool {
	if err == nil {
		return true
	}
	var apiErr *api.Error
	if !errors.As(err, &apiErr) {
		return false
	}
	switch apiErr.Code {
	case api.NotFound, api.StaleGeneration, api.StaleIdentity:
		return true
	}
	return false
}

// encode validates and writes the file's content.
func (e Entry) encode() ([]byte, error) {
	if err := e.Validate(); err != nil {
		return nil, err
	}
	w := wireEntry{
		V: formatVersion, Network: e.Network, ContainerID: e.ContainerID, IfName: e.IfName,
		Generation: unknownTag, BootID: e.BootID, Cookie: e.Cookie, Daemon: e.Daemon, QueuedAt: e.QueuedAt.UTC(), SinceBoot: int64(e.SinceBoot),
	}
	if !e.Generation.IsZero() {
		w.Generation = e.Generation.String()
	}
	return json.Marshal(w)
}

// parse reads a file's content, strictly: what this version did not write, it does
// not act on.
func parse(data []byte) (Entry, error) {
	if len(data) == 0 {
		return Entry{}, errors.New("file is empty")
	}
	if len(data) > MaxEntryBytes {
		return Entry{}, fmt.Errorf("file has %d bytes, at most %d are allowed", len(data), MaxEntryBytes)
	}
	var w wireEntry
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&w); err != nil {
		return Entry{}, fmt.Errorf("file is no entry: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Entry{}, errors.New("file goes on after the entry")
	}
	if w.V != formatVersion {
		return Entry{}, fmt.Errorf("format version is %s, this program knows %d", strconv.Itoa(w.V), formatVersion)
	}
	e := Entry{
		Attachment: endpoint.Attachment{Network: w.Network, ContainerID: w.ContainerID, IfName: w.IfName},
		BootID:     w.BootID, Cookie: w.Cookie, Daemon: w.Daemon, QueuedAt: w.QueuedAt, SinceBoot: time.Duration(w.SinceBoot),
	}
	if w.Generation != unknownTag {
		g, err := endpoint.ParseGeneration(w.Generation)
		if err != nil {
			return Entry{}, err
		}
		e.Generation = g
	}
	// JSON in Go takes keys in any case and twice. Only the exact bytes that encode
	// writes are an entry; this also validates it.
	canonical, err := e.encode()
	if err != nil {
		return Entry{}, err
	}
	if !bytes.Equal(data, canonical) {
		return Entry{}, errors.New("file is not in the exact form that this program writes")
	}
	return e, nil
}
