// Package client is the Go client of mknetd's API (spec/api.md): one method a
// route, over the Unix socket or, for CNI verbs and reads, over TCP with mutual
// TLS. It needs nothing but the standard library and x/sys.
//
// Errors tell three cases apart. An answer of mknetd is an *api.Error. No answer
// matches ErrUnreachable: the socket is missing, nobody listens, time ran out or
// the connection broke; the call may or may not have been carried out. An answer
// that is not what the API promises is a *ReplyError.
//
// The client starts no goroutine that outlives a call, and keeps at most a few
// idle connections, which Close ends.
package client
