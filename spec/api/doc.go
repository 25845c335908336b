// Package api defines mknetd's HTTP/JSON interface: routes, request and reply
// bodies, error codes and limits. The OpenAPI document openapi.yaml beside it
// says the same for other languages; a test in mknetd holds the server to both.
//
// The package is pure. The Go client is mknet/spec/client.
package api
