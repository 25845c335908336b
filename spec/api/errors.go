package api

import (
	"errors"
	"fmt"
	"net/http"
)

// Code is the stable name of a kind of error.
type Code string

// The codes; a code is never renamed or given another meaning.
const (
	InvalidArgument    Code = "INVALID_ARGUMENT"    // the request is malformed; it will never work as it is
	NotFound           Code = "NOT_FOUND"           // no such endpoint, lease or document
	AlreadyExists      Code = "ALREADY_EXISTS"      // the attachment or the interface is already there
	StaleIdentity      Code = "STALE_IDENTITY"      // the attachment now belongs to another namespace or endpoint
	StaleGeneration    Code = "STALE_GENERATION"    // the endpoint or sandbox generation is not the current one
	FailedPrecondition Code = "FAILED_PRECONDITION" // the endpoint's state does not allow it now
	ResourceExhausted  Code = "RESOURCE_EXHAUSTED"  // no free address, too many calls, too many objects
	Unavailable        Code = "UNAVAILABLE"         // mknetd or the kernel cannot do it now
	Unsupported        Code = "UNSUPPORTED"         // this kernel or this mode has no such thing
	Internal           Code = "INTERNAL"            // a defect or an unexpected answer of the kernel
)

// mapping is the one table from a code to what callers see.
var mapping = map[Code]struct {
	http int
	cni  uint
}{
	InvalidArgument:    {http.StatusBadRequest, 7},           // CNI 7: invalid network config
	NotFound:           {http.StatusNotFound, 3},             // CNI 3: unknown container
	AlreadyExists:      {http.StatusConflict, 100},           // 100 and above are ours
	StaleIdentity:      {http.StatusConflict, 101},           //
	StaleGeneration:    {http.StatusConflict, 102},           //
	FailedPrecondition: {http.StatusPreconditionFailed, 103}, //
	ResourceExhausted:  {http.StatusTooManyRequests, 104},    //
	Unavailable:        {http.StatusServiceUnavailable, 11},  // CNI 11: try again later
	Unsupported:        {http.StatusNotImplemented, 2},       // CNI 2: unsupported field
	Internal:           {http.StatusInternalServerError, 105},
}

// Codes returns every code.
func Codes() []Code {
	return []Code{
		InvalidArgument, NotFound, AlreadyExists, StaleIdentity, StaleGeneration,
		FailedPrecondition, ResourceExhausted, Unavailable, Unsupported, Internal,
	}
}

// HTTPStatus is the status that carries the code; an unknown code is 500.
func (c Code) HTTPStatus() int {
	if m, ok := mapping[c]; ok {
		return m.http
	}
	return http.StatusInternalServerError
}

// Error is the error of every mknetd call, on the wire and in Go.
type Error struct {
	Code      Code     `json:"code"`
	Message   string   `json:"message"`           // one line: what, which object, why, what next
	Retryable bool     `json:"retryable"`         // the same call may succeed later
	Details   []string `json:"details,omitempty"` // one line each: faults, causes, limits
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Is matches another *Error by code alone, so that
// errors.Is(err, &api.Error{Code: api.NotFound}) works.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && t.Message == ""
}

// CNICode is the CNI error code: 11 (try again later) for everything retryable.
func (e *Error) CNICode() uint {
	if e.Retryable {
		return 11
	}
	if m, ok := mapping[e.Code]; ok {
		return m.cni
	}
	return mapping[Internal].cni
}

// Errorf makes an error that is not worth a retry, except for Unavailable.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Retryable: code == Unavailable}
}

// Retryablef makes an error that a later call may not meet.
func Retryablef(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Retryable: true}
}

// CodeOf returns the code of err: that of the *Error in its chain, else Internal;
// empty for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return Internal
}
