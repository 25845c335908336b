package api

import (
	"net/http"

	"mknet/spec/crash"
)

var (
	replySent       = crash.New("api.reply-sent")
	descriptorsSent = crash.New("api.descriptors-sent")
)

// answered is the point after a reply to a call that changes something. net/http
// keeps a reply back until its handler returns, which is too late for a point.
func (c *call) answered(w http.ResponseWriter) {
	if !crash.Enabled || c.route == nil || c.route.method == http.MethodGet {
		return
	}
	_ = http.NewResponseController(w).Flush() // the caller may be gone
	replySent.At(c.route.method + c.route.path)
}
