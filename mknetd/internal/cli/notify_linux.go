package cli

import (
	"fmt"
	"net"
	"os"
	"time"
)

// notify tells the service manager (sd_notify(3)): one datagram to the socket that
// NOTIFY_SOCKET names, where '@' stands for the NUL of an abstract address.
// Without that variable it does nothing.
func notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] != '/' && path[0] != '@' {
		return fmt.Errorf("NOTIFY_SOCKET %q: neither a path nor an abstract address", path)
	}
	// net turns the '@' into a NUL itself.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	return nil
}
