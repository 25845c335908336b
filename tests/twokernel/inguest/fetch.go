package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// fetch gets a URL and prints the SHA-256 and the size of its body. timeout is
// the longest that nothing may arrive.
func fetch(out io.Writer, url string, timeout time.Duration) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	stalled := time.AfterFunc(timeout, func() { cancel(fmt.Errorf("nothing arrived for %s", timeout)) })
	defer stalled.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	hash := sha256.New()
	size, err := io.Copy(hash, readerFunc(func(p []byte) (int, error) {
		stalled.Reset(timeout)
		return resp.Body.Read(p)
	}))
	if err != nil {
		return fmt.Errorf("%s: after %d bytes: %w", url, size, err)
	}
	fmt.Fprintf(out, "%x %d\n", hash.Sum(nil), size)
	return nil
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// lookup prints the addresses of a name, by the resolver of /etc/resolv.conf.
func lookup(out io.Writer, name string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", name)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, addrs)
	return nil
}
