package main

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sync/errgroup"

	"mknet/tests/twokernel/wire"
)

// serveInternet answers HTTP on port 80 of every address, and DNS on the given
// ones, and logs who asked.
func serveInternet(dns []string) error {
	body := wire.Payload()
	http.HandleFunc("GET "+wire.PayloadPath, func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		slog.Info("http", "from", host, "path", r.URL.Path)
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		_, _ = w.Write(body)
	})
	http.HandleFunc("GET /{$}", func(http.ResponseWriter, *http.Request) {})
	var g errgroup.Group
	g.Go(func() error {
		srv := &http.Server{Addr: ":80", ReadHeaderTimeout: time.Minute}
		return srv.ListenAndServe()
	})
	for _, address := range dns {
		conn, err := net.ListenPacket("udp4", address)
		if err != nil {
			return err
		}
		g.Go(func() error { return serveDNS(conn) })
	}
	return g.Wait()
}

func serveDNS(conn net.PacketConn) error {
	buf := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return err
		}
		reply, err := answerDNS(buf[:n])
		if err != nil {
			slog.Warn("dns", "from", from.String(), "err", err)
			continue
		}
		slog.Info("dns", "from", from.String())
		_, _ = conn.WriteTo(reply, from)
	}
}

// answerDNS builds the reply to one question: the site's address, or that there
// is no such name.
func answerDNS(query []byte) ([]byte, error) {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, err
	}
	if head.Response {
		return nil, errors.New("is no question")
	}
	m := dnsmessage.Message{Header: head, Questions: []dnsmessage.Question{q}}
	m.Response, m.Authoritative = true, true
	switch {
	case q.Name.String() != wire.SiteName+".":
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60},
			Body:   &dnsmessage.AResource{A: netip.MustParseAddr(wire.SiteAddr).As4()},
		}}
	}
	return m.Pack()
}
