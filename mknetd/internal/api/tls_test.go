package api_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

// authority signs certificates for a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{cert: cert, key: key, pool: x509.NewCertPool()}
	a.pool.AddCert(cert)
	return a
}

func (a *authority) issue(t *testing.T, name string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func clientTLS(t *testing.T) *tls.Config {
	a := newAuthority(t)
	return &tls.Config{Certificates: []tls.Certificate{a.issue(t, "c")}, RootCAs: a.pool}
}

func TestTCP(t *testing.T) {
	checkLeaks(t)
	ca, stranger := newAuthority(t), newAuthority(t)
	var who shared[endpoint.Process]
	f := &fake{create: func(_ context.Context, r specapi.CreateRequest, ns *os.File, p endpoint.Process) (endpoint.Endpoint, error) {
		who.set(p)
		if ns != nil {
			t.Error("a descriptor came over TCP")
		}
		return sample(r.Attachment), nil
	}}
	srv, err := api.New(api.Config{
		Engine: f, Log: slog.New(slog.DiscardHandler), Socket: filepath.Join(t.TempDir(), "s"), SocketGID: -1,
		TCP: &api.TCP{Address: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{ca.issue(t, "mknetd")}, ClientCAs: ca.pool}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	addr := "tcp://" + srv.TCPAddr().String()
	dial := func(c *tls.Config) *client.Client {
		cl, err := client.New(addr, client.WithTLS(c))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cl.Close)
		return cl
	}
	good := dial(&tls.Config{Certificates: []tls.Certificate{ca.issue(t, "node 7")}, RootCAs: ca.pool})
	defer good.Close()
	if _, err := good.Health(ctx); err != nil {
		t.Fatalf("health: %v", err)
	}
	if _, err := good.CreateEndpoint(ctx, specapi.CreateRequest{Attachment: att, NetnsPath: "/n"}, nil); err != nil || who.get() != (endpoint.Process{Comm: "tls:node?7"}) {
		t.Errorf("create: %v, peer %+v", err, who.get())
	}
	for name, call := range map[string]func() error{
		"bind": func() error {
			_, err := good.Bind(ctx, specapi.BindRequest{Selector: specapi.Selector{Generation: sampleGen}, Sandbox: sandbox})
			return err
		},
		"unbind": func() error { return good.Unbind(ctx, sampleGen, specapi.UnbindRequest{Sandbox: sandbox}) },
		"provision": func() error {
			_, err := good.Provision(ctx, specapi.ProvisionRequest{CreateRequest: specapi.CreateRequest{Attachment: att}, Sandbox: sandbox})
			return err
		},
		"release": func() error {
			_, err := good.Release(ctx, specapi.ReleaseRequest{Generation: sampleGen, Sandbox: sandbox})
			return err
		},
	} {
		if err := call(); specapi.CodeOf(err) != specapi.Unsupported || !strings.Contains(err.Error(), "Unix socket") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]*tls.Config{
		"a caller of another CA":   {Certificates: []tls.Certificate{stranger.issue(t, "x")}, RootCAs: ca.pool},
		"a daemon of another CA":   {Certificates: []tls.Certificate{ca.issue(t, "x")}, RootCAs: stranger.pool},
		"a certificate for no-one": {GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &tls.Certificate{}, nil }, RootCAs: ca.pool},
	} {
		cl := dial(c)
		if _, err := cl.Health(ctx); err == nil || errors.Is(err, client.ErrUnreachable) {
			t.Errorf("%s: %v", name, err)
		}
		cl.Close()
	}
	plain, err := net.Dial("tcp", srv.TCPAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	_ = plain.SetDeadline(time.Now().Add(patience))
	_, _ = plain.Write([]byte("GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\n\r\n"))
	buf := make([]byte, 1024)
	n, _ := plain.Read(buf)
	if strings.Contains(string(buf[:n]), "ready") {
		t.Error("answered without TLS")
	}
}

func TestTCPNeedsMutualTLS(t *testing.T) {
	ca := newAuthority(t)
	for name, c := range map[string]*tls.Config{
		"no TLS":         nil,
		"no CA":          {Certificates: []tls.Certificate{ca.issue(t, "m")}},
		"no certificate": {ClientCAs: ca.pool},
	} {
		if _, err := api.New(api.Config{Engine: &fake{}, Log: slog.New(slog.DiscardHandler), Socket: "/s", TCP: &api.TCP{Address: "127.0.0.1:0", TLS: c}}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for _, addr := range []string{"tcp://h:1", "tcp://h", "http://h:1", "unix://rel", "rel"} {
		if _, err := client.New(addr); err == nil {
			t.Errorf("client for %s: accepted", addr)
		}
	}
}
