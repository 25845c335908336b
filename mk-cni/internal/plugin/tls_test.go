package plugin

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// authority signs certificates of one test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", true)
	return a
}

// sign writes name.crt and name.key, PEM, and returns both.
func (a *authority) sign(name string, isCA bool) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: isCA, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := a.cert, a.key
	if isCA {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{name + ".crt": {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(filepath.Join(a.dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert, key
}

// Over TCP with mutual TLS everything works but passing the descriptor; mknetd
// opens the path instead.
func TestDaemonOverTLS(t *testing.T) {
	l := newLab(t)
	ca := newAuthority(t)
	ca.sign("server", false)
	ca.sign("client", false)
	pair, err := tls.LoadX509KeyPair(ca.dir+"/server.crt", ca.dir+"/server.key")
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(l.daemon.serve)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(ln)
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	conf := func(client string) *string {
		return text(fmt.Sprintf(`{"cniVersion":"1.1.0","name":"mknet","type":"mk-cni","daemon-endpoint":"tcp://%s","cacheDir":%q,"tls-ca-file":"%s/ca.crt","tls-cert-file":"%s/%s.crt","tls-key-file":"%s/%s.key"}`,
			ln.Addr(), l.cache, ca.dir, ca.dir, client, ca.dir, client))
	}
	for _, in := range []invocation{{verb: "STATUS"}, l.add(), {verb: "DEL", netns: l.ns.Path()}, {verb: "DEL", netns: l.ns.Path()}} {
		in.stdin = conf("client")
		l.ok(in)
	}
	if calls := l.daemon.called(); !slices.Equal(calls, []string{"GET /v1/daemon/health", "POST /v1/endpoints", byGeneration, byAttachment}) {
		t.Errorf("called %v", calls)
	}
	l.fails(invocation{verb: "STATUS", stdin: conf("nobody")}, 5, "nobody.crt")
	stranger := newAuthority(t)
	stranger.sign("client", false)
	ca.dir = stranger.dir
	in := l.add()
	in.stdin = conf("client")
	l.fails(in, 5, ln.Addr().String(), "x509")
	l.unchanged()
}
