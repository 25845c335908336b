package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sync/errgroup"
)

// What the demo's internet serves.
const (
	siteName     = "www.demo.test."
	payloadBytes = 10 << 20
)

// payload is the body of /10MB: a fixed pseudo-random stream, so that a lost,
// doubled or swapped segment changes its hash.
func payload() []byte {
	out := make([]byte, 0, payloadBytes)
	block := sha256.Sum256([]byte("mknet demo"))
	for len(out) < payloadBytes {
		out = append(out, block[:]...)
		block = sha256.Sum256(block[:])
	}
	return out[:payloadBytes]
}

func payloadHash() string {
	sum := sha256.Sum256(payload())
	return hex.EncodeToString(sum[:])
}

// serveInternet answers HTTP on port 80 and DNS on port 53 of every address of
// the namespace it runs in, and logs who asked.
func serveInternet(ctx context.Context) error {
	body := payload()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /10MB", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = w.Write(body)
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello, %s\n", r.RemoteAddr)
	})
	return serve(ctx, ":80", mux, true)
}

// serveHello answers HTTP with one line on the given address.
func serveHello(ctx context.Context, addr, line string) error {
	return serve(ctx, addr, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, line) }), false)
}

func serve(ctx context.Context, addr string, h http.Handler, dns bool) error {
	logged := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		slog.Info("http", "from", host, "path", r.URL.Path)
		h.ServeHTTP(w, r)
	})
	g, ctx := errgroup.WithContext(ctx)
	srv := &http.Server{Addr: addr, Handler: logged, ReadHeaderTimeout: 10 * time.Second}
	g.Go(func() error {
		if err := srv.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error { <-ctx.Done(); return srv.Close() })
	if dns {
		g.Go(func() error { return serveDNS(ctx) })
	}
	return g.Wait()
}

// serveDNS answers every A question for siteName with the internet's address,
// from the address that was asked.
func serveDNS(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, addr := range []string{internetAddr, metadataAddr} {
		conn, err := net.ListenPacket("udp4", net.JoinHostPort(addr, "53"))
		if err != nil {
			return err
		}
		g.Go(func() error { <-ctx.Done(); return conn.Close() })
		g.Go(func() error {
			buf := make([]byte, 1500)
			for {
				n, from, err := conn.ReadFrom(buf)
				if err != nil {
					return ctx.Err()
				}
				if reply := answer(buf[:n]); reply != nil {
					slog.Info("dns", "from", from.String())
					_, _ = conn.WriteTo(reply, from)
				}
			}
		})
	}
	return g.Wait()
}

// answer builds the reply to one question; nil for what is not a question.
func answer(query []byte) []byte {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil || head.Response {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	head.Response, head.Authoritative = true, true
	known := q.Name.String() == siteName
	if !known {
		head.RCode = dnsmessage.RCodeNameError
	}
	b := dnsmessage.NewBuilder(nil, head)
	if b.StartQuestions() != nil || b.Question(q) != nil || b.StartAnswers() != nil {
		return nil
	}
	if known && q.Type == dnsmessage.TypeA {
		a := dnsmessage.AResource{A: [4]byte(net.ParseIP(internetAddr).To4())}
		if b.AResource(dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60}, a) != nil {
			return nil
		}
	}
	reply, err := b.Finish()
	if err != nil {
		return nil
	}
	return reply
}
