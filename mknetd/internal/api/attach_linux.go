package api

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// attach asks the engine for the queues and arranges for them to be sent in place
// of an HTTP reply: "101 Switching Protocols", then one message with an
// AttachReply and the descriptors, then the end of the connection.
func (s *Server) attach(ctx context.Context, c *call) (any, error) {
	var req api.AttachRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := req.Sandbox.Validate(); err != nil {
		return nil, err
	}
	if nonce, err := hex.DecodeString(req.Nonce); err != nil || len(nonce) != 16 {
		return nil, api.Errorf(api.InvalidArgument, "nonce: must be the 32 hexadecimal digits that bind returned")
	}
	if req.Queues < 1 || req.Queues > api.MaxQueues {
		return nil, api.Errorf(api.InvalidArgument, "queues: is %d, must be 1 to %d", req.Queues, api.MaxQueues)
	}
	if !c.upgrade {
		return nil, api.Errorf(api.InvalidArgument, "attach answers by descriptor passing: send \"Connection: Upgrade\" and \"Upgrade: %s\"", api.AttachProtocol)
	}
	if c.peer.PID == 0 {
		return nil, api.Errorf(api.FailedPrecondition, "the calling process cannot be identified (it has ended, or lives in another PID namespace): a shim must be known to be fenced later")
	}
	c.note(endpoint.Attachment{}, c.gen)
	rep, files, err := s.engine.Attach(ctx, c.gen, req, c.peer)
	if err != nil {
		return nil, errors.Join(err, closeFiles(files))
	}
	if len(files) == 0 || len(files) > api.MaxQueues {
		return nil, errors.Join(fmt.Errorf("attach returned %d queues, want 1 to %d", len(files), api.MaxQueues), closeFiles(files))
	}
	rep.Queues = len(files)
	body, err := json.Marshal(rep)
	if err != nil {
		return nil, errors.Join(err, closeFiles(files))
	}
	c.takeOver = func(w http.ResponseWriter, conn *passConn) error {
		err := s.sendQueues(w, conn, body, files)
		return errors.Join(err, closeFiles(files))
	}
	return nil, nil
}

func (s *Server) sendQueues(w http.ResponseWriter, conn *passConn, body []byte, files []*os.File) error {
	hijacked, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return fmt.Errorf("take the connection over: %w", err)
	}
	if hijacked != conn {
		return errors.Join(errors.New("the connection is not the caller's"), hijacked.Close())
	}
	err = conn.SetWriteDeadline(time.Now().Add(s.limits.Reply))
	if err == nil {
		head := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + api.AttachProtocol + "\r\n\r\n"
		err = conn.send([]byte(head), body, files)
		descriptorsSent.Here()
	}
	return errors.Join(err, conn.Close())
}

func closeFiles(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
