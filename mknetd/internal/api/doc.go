// Package api serves mknetd's HTTP/JSON interface on a Unix socket and, where it
// is configured, on a TCP socket with mutual TLS. It owns listening, who may
// call, limits, decoding, deadlines and the shape of every reply; what a call
// does is the [Engine]'s. It touches no kernel object and no record.
//
// It implements spec/api.md and spec/api/openapi.yaml.
package api
