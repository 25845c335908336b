package vsockswitch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Requests of the vhost-user protocol that a vsock device meets (QEMU,
// docs/interop/vhost-user.rst).
const (
	reqGetFeatures         = 1
	reqSetFeatures         = 2
	reqSetOwner            = 3
	reqResetOwner          = 4
	reqSetMemTable         = 5
	reqSetVringNum         = 8
	reqSetVringAddr        = 9
	reqSetVringBase        = 10
	reqGetVringBase        = 11
	reqSetVringKick        = 12
	reqSetVringCall        = 13
	reqSetVringErr         = 14
	reqGetProtocolFeatures = 15
	reqSetProtocolFeatures = 16
	reqGetQueueNum         = 17
	reqSetVringEnable      = 18
	reqGetConfig           = 24
)

const (
	featureVersion1 = 1 << 32
	featureProtocol = 1 << 30

	protocolMQ       = 1 << 0
	protocolReplyAck = 1 << 3
	protocolConfig   = 1 << 9

	messageVersion   = 1
	messageReply     = 1 << 2
	messageNeedReply = 1 << 3

	vringNoFD = 1 << 8 // in the u64 of SET_VRING_KICK, _CALL and _ERR

	messageHeaderBytes = 12
	// maxMessage bounds a payload: the largest is a memory table of 8 regions.
	maxMessage = 4096
	// maxFiles bounds the descriptors of one message.
	maxFiles = maxRegions
	// queues is receive and transmit; QEMU keeps the event queue.
	queues = 2
)

// payloadBytes is the least that each request carries.
var payloadBytes = map[uint32]int{
	reqSetFeatures: 8, reqSetProtocolFeatures: 8, reqSetMemTable: 8, reqSetVringNum: 8, reqSetVringAddr: 40, reqSetVringBase: 8,
	reqGetVringBase: 8, reqSetVringKick: 8, reqSetVringCall: 8, reqSetVringErr: 8, reqSetVringEnable: 8, reqGetConfig: 12,
}

// vring is what the front end has said about one queue.
type vring struct {
	entries                 uint32
	descriptor, avail, used uint64 // addresses in QEMU
	base                    uint16
	kick                    *os.File
	call                    atomic.Pointer[os.File]
}

// session is one front end's connection.
type session struct {
	conn     *net.UnixConn
	back     backend
	log      *slog.Logger
	protocol uint64 // negotiated protocol features
	mem      *memory
	vrings   [queues]vring
	rings    [queues]*ring
	dev      *device // nil while the rings do not run
}

// serve answers one front end until it disconnects, and gives back all that came
// from it. It takes ownership of conn.
func serve(conn *net.UnixConn, back backend, log *slog.Logger) error {
	s := &session{conn: conn, back: back, log: log}
	defer s.close()
	for {
		if err := s.message(); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
				return nil
			}
			return err
		}
	}
}

func (s *session) close() {
	s.halt()
	for i := range s.vrings {
		closeFile(s.vrings[i].kick)
		closeFile(s.vrings[i].call.Swap(nil))
	}
	if err := s.mem.unmap(); err != nil {
		s.log.Error("unmap guest memory", "err", err)
	}
	s.conn.Close()
}

func closeFile(f *os.File) {
	if f != nil {
		f.Close()
	}
}

// message reads one message, acts on it and answers.
func (s *session) message() error {
	var head [messageHeaderBytes]byte
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, _, _, err := s.conn.ReadMsgUnix(head[:], oob)
	if err != nil {
		return err
	}
	files, err := passedFiles(oob[:oobn])
	defer func() {
		for _, f := range files {
			closeFile(f)
		}
	}()
	if err != nil {
		return err
	}
	if n == 0 {
		return io.EOF
	}
	if _, err := io.ReadFull(s.conn, head[n:]); err != nil {
		return err
	}
	request := binary.LittleEndian.Uint32(head[:])
	flags := binary.LittleEndian.Uint32(head[4:])
	size := binary.LittleEndian.Uint32(head[8:])
	if size > maxMessage || int(size) < payloadBytes[request] {
		return fmt.Errorf("vhost-user request %d with %d bytes of payload", request, size)
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(s.conn, payload); err != nil {
		return err
	}
	reply, err := s.handle(request, payload, files)
	if err != nil {
		return fmt.Errorf("vhost-user request %d: %w", request, err)
	}
	if reply == nil && flags&messageNeedReply != 0 && s.protocol&protocolReplyAck != 0 {
		reply = make([]byte, 8) // 0: success
	}
	if reply == nil {
		return nil
	}
	out := binary.LittleEndian.AppendUint32(nil, request)
	out = binary.LittleEndian.AppendUint32(out, messageVersion|messageReply)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(reply)))
	_, err = s.conn.Write(append(out, reply...))
	return err
}

// passedFiles takes the descriptors out of a control message.
func passedFiles(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			// QEMU's eventfds are non-blocking; with that flag NewFile makes reads
			// that a deadline can end.
			files = append(files, os.NewFile(uintptr(fd), "vhost-user"))
		}
	}
	return files, nil
}

// handle acts on one request. It takes a file over by setting its slot to nil.
func (s *session) handle(request uint32, p []byte, files []*os.File) ([]byte, error) {
	le := binary.LittleEndian
	switch request {
	case reqGetFeatures:
		return le.AppendUint64(nil, featureVersion1|featureProtocol), nil
	case reqGetProtocolFeatures:
		return le.AppendUint64(nil, protocolMQ|protocolReplyAck|protocolConfig), nil
	case reqSetProtocolFeatures:
		s.protocol = le.Uint64(p)
		return nil, nil
	case reqGetQueueNum:
		return le.AppendUint64(nil, queues), nil
	case reqGetConfig:
		return s.config(p), nil
	case reqSetMemTable:
		return nil, s.setMemory(p, files)
	case reqSetVringNum, reqSetVringAddr, reqSetVringBase, reqGetVringBase, reqSetVringKick, reqSetVringCall, reqSetVringErr:
		return s.handleVring(request, p, files)
	case reqSetFeatures, reqSetOwner, reqResetOwner, reqSetVringEnable:
		return nil, nil
	}
	s.log.Warn("vhost-user request ignored", "request", request, "bytes", len(p), "descriptors", len(files))
	return nil, nil
}

// config answers with the part of the device's configuration space that is asked
// for: struct virtio_vsock_config, the guest's CID. An empty payload says no.
func (s *session) config(p []byte) []byte {
	cid := binary.LittleEndian.AppendUint64(nil, s.back.cid())
	offset, size := uint64(binary.LittleEndian.Uint32(p)), uint64(binary.LittleEndian.Uint32(p[4:]))
	if offset+size > uint64(len(cid)) || 12+size > uint64(len(p)) {
		return []byte{}
	}
	out := append([]byte(nil), p...)
	copy(out[12:], cid[offset:offset+size])
	return out
}
