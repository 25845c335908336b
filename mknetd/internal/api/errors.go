package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// toError is the one place where an error becomes what a caller sees.
func toError(err error) *api.Error {
	var (
		e     *api.Error
		id    *endpoint.IdentifierError
		state *endpoint.StateError
	)
	switch {
	case errors.As(err, &e):
		e = &api.Error{Code: e.Code, Message: e.Message, Retryable: e.Retryable, Details: e.Details}
	case errors.As(err, &id):
		e = api.Errorf(api.InvalidArgument, "%s", id.Error())
	case errors.As(err, &state):
		e = api.Errorf(api.FailedPrecondition, "%s", state.Error())
	case errors.Is(err, context.DeadlineExceeded):
		e = api.Errorf(api.Unavailable, "the call did not finish in time: %s", err)
	case errors.Is(err, context.Canceled):
		e = api.Errorf(api.Unavailable, "the call was given up: %s", err)
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		e = outOfDescriptors(err)
	case transient(err):
		e = api.Errorf(api.Unavailable, "the kernel could not do it now: %s", err)
	default:
		e = api.Errorf(api.Internal, "%s", err)
	}
	e.Message = oneLine(e.Message)
	for i, d := range e.Details {
		if oneLine(d) != d {
			e.Details = append([]string(nil), e.Details...)
			e.Details[i] = oneLine(d)
		}
	}
	return e
}

// outOfDescriptors is the answer while mknetd or the host can open no further file.
func outOfDescriptors(err error) *api.Error {
	return api.Errorf(api.Unavailable, "mknetd has no file descriptor left (see LimitNOFILE of its unit): %s", err)
}

// transient tells the kernel's refusals that pass by themselves. An interrupted dump
// counts as EINTR.
func transient(err error) bool {
	for _, errno := range []unix.Errno{unix.EBUSY, unix.EAGAIN, unix.EINTR, unix.ENOBUFS, unix.ENOMEM} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// oneLine keeps a message to the one line that the contract promises.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// errorReply is an error as a whole HTTP/1.1 response for a connection that is
// turned away before it has asked anything.
func errorReply(status int, e *api.Error) []byte {
	body, err := json.Marshal(e)
	if err != nil {
		return nil
	}
	return []byte("HTTP/1.1 " + strconv.Itoa(status) + " " + http.StatusText(status) + "\r\n" +
		"Content-Type: application/json\r\nConnection: close\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + string(body))
}
