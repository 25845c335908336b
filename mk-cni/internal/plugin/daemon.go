package plugin

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/config"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

// daemon is what the verbs ask of mknetd; *client.Client is the one there is.
type daemon interface {
	CreateEndpoint(context.Context, api.CreateRequest, *os.File) (endpoint.Endpoint, error)
	CheckEndpoint(context.Context, endpoint.Generation, api.Selector) (api.CheckReply, error)
	Endpoints(context.Context, client.Filter) ([]endpoint.Endpoint, error)
	GetEndpoint(context.Context, endpoint.Generation) (endpoint.Endpoint, error)
	DeleteEndpoint(context.Context, endpoint.Generation) (api.DeleteReply, error)
	Delete(context.Context, api.DeleteRequest, *os.File) (api.DeleteReply, error)
	GC(context.Context, api.GCRequest) (api.GCReply, error)
	Health(context.Context) (api.Health, error)
	Config(context.Context) (api.DaemonConfig, error)
	Close()
}

// dial prepares calls of mknetd; nothing is opened before the first one.
func dial(d config.Daemon, trace string) (daemon, error) {
	opts := []client.Option{client.WithTrace(trace)}
	if d.Network == "tcp" && d.CAFile != "" {
		conf, err := tlsConfig(d)
		if err != nil {
			return nil, types.NewError(types.ErrIOFailure, err.Error(), "")
		}
		opts = append(opts, client.WithTLS(conf))
	}
	c, err := client.New(d.String(), opts...)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, err.Error(), "")
	}
	return c, nil
}

func tlsConfig(d config.Daemon) (*tls.Config, error) {
	ca, err := os.ReadFile(d.CAFile)
	if err != nil {
		return nil, fmt.Errorf("tls-ca-file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("tls-ca-file %s: has no PEM certificate", d.CAFile)
	}
	pair, err := tls.LoadX509KeyPair(d.Cert, d.Key)
	if err != nil {
		return nil, fmt.Errorf("tls-cert-file %s, tls-key-file %s: %w", d.Cert, d.Key, err)
	}
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}, nil
}
