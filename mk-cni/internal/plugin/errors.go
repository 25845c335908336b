package plugin

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/cache"
	"mknet/mk-cni/internal/config"
	"mknet/mk-cni/internal/delegate"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/delqueue"
	"mknet/spec/privdir"
)

// Our own CNI error codes. 100 to 105 are those of package api.
const (
	CodeInternal    = 105 // a defect of mk-cni, a panic included
	CodeCheckFailed = 106 // CHECK: something of the endpoint is not as it should be
	CodeBadReply    = 107 // mknetd's answer does not fit the request; rolled back
	CodeIncomplete  = 108 // GC: something could not be removed
	CodeIPAM        = 109 // the IPAM plugin failed with a code of its own, or with none
)

// cniError is the one place where an error becomes a CNI error. Where err says
// more than the error that decides the code (an undo that failed, the object that
// a layer added), the whole text goes into the details.
func cniError(err error) *types.Error {
	var (
		already   *types.Error
		input     *config.Error
		fromAPI   *api.Error
		ipam      *delegate.Error
		notFound  *delegate.NotFoundError
		unsafeErr *privdir.UnsafeError
		untrusted *tls.CertificateVerificationError
		alert     tls.AlertError
	)
	switch {
	case errors.As(err, &already):
		return types.NewError(already.Code, already.Msg, details(already.Details, rest(err, already)))
	case errors.As(err, &input):
		return types.NewError(input.Problems[0].Code, input.Error(), input.Details())
	case errors.As(err, &fromAPI):
		return types.NewError(fromAPI.CNICode(), fromAPI.Message, details(string(fromAPI.Code), strings.Join(fromAPI.Details, "; "), rest(err, fromAPI)))
	case errors.As(err, &ipam):
		code := ipam.Code
		if code == 0 || code >= 100 { // whose meaning is that plugin's
			code = CodeIPAM
		}
		return types.NewError(code, ipam.Error(), rest(err, ipam))
	case errors.As(err, &notFound):
		return types.NewError(types.ErrInvalidEnvironmentVariables, notFound.Error(), rest(err, notFound))
	case errors.Is(err, cache.ErrSuperseded), unreachable(err):
		return types.NewError(types.ErrTryAgainLater, oneLine(err), "")
	case errors.Is(err, delqueue.ErrFull), errors.As(err, &unsafeErr), isErrno(err), errors.As(err, &untrusted), errors.As(err, &alert):
		return types.NewError(types.ErrIOFailure, oneLine(err), "")
	}
	return types.NewError(CodeInternal, oneLine(err), "")
}

// rest is the text of err where it says more than inner alone.
func rest(err, inner error) string {
	if err.Error() == inner.Error() {
		return ""
	}
	return oneLine(err)
}

func details(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "; ")
}

// oneLine makes one line of joined errors.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// unreachable reports whether mknetd did not answer, as opposed to refusing. An
// answer that is none of mknetd's counts: whoever gave it has refused nothing.
func unreachable(err error) bool {
	var refused *api.Error
	var strange *client.ReplyError
	if err == nil || errors.As(err, &refused) {
		return false
	}
	return errors.Is(err, client.ErrUnreachable) || errors.As(err, &strange) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// refusedForNow reports whether mknetd refuses what it may do later.
func refusedForNow(err error) bool {
	var refused *api.Error
	return errors.As(err, &refused) && refused.Retryable
}

// notSent reports whether an unreachable mknetd cannot have read the request: it
// was not even connected to.
func notSent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}
