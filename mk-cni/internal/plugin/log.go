package plugin

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"mknet/spec/privdir"
)

const (
	maxLogBytes  = 4 << 20 // of log-file; one rotated file of the same size stays
	maxLogRecord = 4096
)

// openLog starts logging to log-file. Without one nothing is logged, and a log
// that cannot be written never fails a call: standard error says so.
func (c *call) openLog() {
	if c.conf.LogFile == "" {
		return
	}
	f, err := privdir.AppendFile(c.conf.LogFile, maxLogBytes)
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "mk-cni: log-file:", err)
		return
	}
	c.logOut = f
	level := slog.LevelInfo
	if c.conf.Debug {
		level = slog.LevelDebug
	}
	c.log = slog.New(slog.NewTextHandler(boundedWriter{f}, &slog.HandlerOptions{Level: level})).
		With("verb", c.verb, "endpoint", c.att.String(), "pid", os.Getpid())
	if c.trace != "" {
		c.log = c.log.With("trace", c.trace)
	}
}

// boundedWriter cuts records: they may repeat hostile input. One record is one
// write, which O_APPEND keeps whole.
type boundedWriter struct{ w io.Writer }

func (b boundedWriter) Write(record []byte) (int, error) {
	if len(record) > maxLogRecord {
		cut := append([]byte(nil), record[:maxLogRecord-4]...)
		if _, err := b.w.Write(append(cut, "...\n"...)); err != nil {
			return 0, err
		}
		return len(record), nil
	}
	return b.w.Write(record)
}

// traceParent returns a W3C trace context that is valid, else nothing:
// version 2 hex digits (not ff), trace ID 32 and parent ID 16 (not all zero),
// flags 2, with hyphens between; https://www.w3.org/TR/trace-context/ section 3.2.
func traceParent(s string) string {
	part := strings.Split(s, "-")
	if len(part) < 4 || len(s) > 128 || part[0] == "00" && len(part) != 4 || part[0] == "ff" {
		return ""
	}
	for i, n := range []int{2, 32, 16, 2} {
		if len(part[i]) != n || strings.Trim(part[i], "0123456789abcdef") != "" {
			return ""
		}
	}
	if strings.Trim(part[1], "0") == "" || strings.Trim(part[2], "0") == "" {
		return ""
	}
	return strings.Join(part[:4], "-")
}
