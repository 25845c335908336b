// Package wire is what the driver of the two-kernel tests and the program inside
// its guests say to each other over a serial line: one JSON document a line, one
// request at a time, every request answered.
package wire

import "time"

// Operations of a Request.
const (
	Run    = "run"    // run Line with the shell, at most Limit; the answer has its output and status
	Start  = "start"  // start Argv in the background under Name; its output goes to LogPath(Name)
	Signal = "signal" // send Signal to the background program Name
	Wait   = "wait"   // wait at most Limit for the background program Name to end; the answer has its status
	Write  = "write"  // write Data to the file Path with mode Mode
)

// Request is the driver's.
type Request struct {
	ID     int           `json:"id"`
	Op     string        `json:"op"`
	Line   string        `json:"line,omitempty"`
	Name   string        `json:"name,omitempty"`
	Argv   []string      `json:"argv,omitempty"`
	Signal int           `json:"signal,omitempty"`
	Path   string        `json:"path,omitempty"`
	Mode   uint32        `json:"mode,omitempty"`
	Data   []byte        `json:"data,omitempty"`
	Limit  time.Duration `json:"limit,omitempty"` // nanoseconds
}

// Reply is the guest's. ID 0 is its greeting after boot, with Output naming the
// kernel.
type Reply struct {
	ID     int    `json:"id"`
	Status int    `json:"status"`          // exit status; 128 + signal as in a shell
	Ended  bool   `json:"ended,omitempty"` // of Wait: the program has ended
	Output string `json:"output,omitempty"`
	Error  string `json:"error,omitempty"` // the request could not be carried out
}

// MaxOutput bounds Reply.Output; the end of a longer one is kept.
const MaxOutput = 64 << 10

// LogPath is where the output of a background program goes in a guest.
func LogPath(name string) string { return "/log/" + name + ".log" }
