package plugin

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

const fakeCookie = 4711

// fakeDaemon is mknetd as far as mk-cni sees it: records without kernel objects.
type fakeDaemon struct {
	t      testing.TB
	socket string
	server *http.Server

	mu        sync.Mutex
	endpoints []endpoint.Endpoint
	calls     []string // "POST /v1/endpoints", in order
	traces    []string
	lastReq   api.CreateRequest
	lastDel   api.DeleteRequest
	lastGC    *api.GCRequest
	slot      uint32

	// What a test changes before it starts the plugin.
	generation endpoint.Generation      // of the next endpoint; zero: random
	onCreate   func(*endpoint.Endpoint) // changes the answer, after the record was made
	raw        map[string]string        // call -> body sent as it is, with status 200 or 201
	fail       map[string]*api.Error    // call -> error
	hang       map[string]bool          // call -> never answered
	faults     []endpoint.Fault         // of CHECK
	onCheck    func(*endpoint.Endpoint) // changes CHECK's record
	gcErrors   []string
	health     api.Health
	pools      []api.Pool // of ordinary pods
}

// startFake serves on a socket of its own until the test ends.
func startFake(t testing.TB) *fakeDaemon {
	t.Helper()
	f := newFake(t, filepath.Join(t.TempDir(), "mknetd.sock"))
	f.listen()
	return f
}

func newFake(t testing.TB, socket string) *fakeDaemon {
	return &fakeDaemon{
		t: t, socket: socket,
		raw: map[string]string{}, fail: map[string]*api.Error{}, hang: map[string]bool{},
		health: api.Health{Ready: true, Version: "test"}, pools: []api.Pool{{Name: "pods"}},
	}
}

func (f *fakeDaemon) listen() {
	f.t.Helper()
	_ = os.Remove(f.socket)
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(f.serve)}
	f.server = server
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l)
	}()
	f.t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
}

func (f *fakeDaemon) serve(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	route := routeOf(r)
	f.mu.Lock()
	f.calls = append(f.calls, route)
	f.traces = append(f.traces, r.Header.Get(api.TraceHeader))
	hang, fail, raw := f.hang[route], f.fail[route], f.raw[route]
	f.mu.Unlock()
	if hang {
		<-r.Context().Done()
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	status, out := f.answer(route, r, body)
	if fail != nil {
		status, out = fail.Code.HTTPStatus(), fail
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if raw != "" {
		_, _ = io.WriteString(w, raw)
		return
	}
	if err := json.NewEncoder(w).Encode(out); err != nil {
		f.t.Errorf("fake daemon: %v", err)
	}
}

// routeOf is the call with the generation taken out.
func routeOf(r *http.Request) string {
	parts := strings.Split(r.URL.Path, "/")
	if len(parts) > 3 && parts[2] == "endpoints" {
		parts[3] = "G"
	}
	return r.Method + " " + strings.Join(parts, "/")
}

func (f *fakeDaemon) answer(route string, r *http.Request, body []byte) (int, any) {
	decode := func(to any) bool {
		dec := json.NewDecoder(strings.NewReader(string(body)))
		dec.DisallowUnknownFields()
		if err := dec.Decode(to); err != nil {
			f.t.Errorf("fake daemon: %s: %v in %s", route, err, body)
			return false
		}
		return true
	}
	if f.fail[route] != nil && !strings.HasPrefix(route, "POST /v1/endpoints") {
		return 0, nil
	}
	gen := func() endpoint.Generation {
		g, err := endpoint.ParseGeneration(strings.Split(r.URL.Path, "/")[3])
		if err != nil {
			f.t.Errorf("fake daemon: %v", err)
		}
		return g
	}
	at := func(g endpoint.Generation) int {
		return slices.IndexFunc(f.endpoints, func(ep endpoint.Endpoint) bool { return ep.Generation == g })
	}
	notFound := func(g endpoint.Generation) (int, any) {
		e := api.Errorf(api.NotFound, "no endpoint %s", g)
		return e.Code.HTTPStatus(), e
	}
	switch route {
	case "POST /v1/endpoints":
		if f.fail[route] != nil || !decode(&f.lastReq) {
			return http.StatusBadRequest, nil
		}
		return f.create(f.lastReq)
	case "GET /v1/endpoints":
		q := r.URL.Query()
		want := endpoint.Attachment{Network: q.Get("network"), ContainerID: q.Get("containerID"), IfName: q.Get("ifName")}
		list := api.EndpointList{Endpoints: []endpoint.Endpoint{}}
		for _, ep := range f.endpoints {
			if ep.Attachment == want {
				list.Endpoints = append(list.Endpoints, ep)
			}
		}
		return http.StatusOK, list
	case "GET /v1/endpoints/G":
		if i := at(gen()); i >= 0 {
			return http.StatusOK, f.endpoints[i]
		}
		return notFound(gen())
	case "DELETE /v1/endpoints/G":
		return http.StatusOK, f.remove(at(gen()))
	case "POST /v1/endpoints/G/check":
		i := at(gen())
		if i < 0 {
			return notFound(gen())
		}
		reply := api.CheckReply{Endpoint: f.endpoints[i], Faults: f.faults}
		if f.onCheck != nil {
			f.onCheck(&reply.Endpoint)
		}
		return http.StatusOK, reply
	case "POST /v1/delete":
		f.lastDel = api.DeleteRequest{}
		if !decode(&f.lastDel) {
			return http.StatusBadRequest, nil
		}
		return http.StatusOK, f.remove(slices.IndexFunc(f.endpoints, func(ep endpoint.Endpoint) bool {
			d := f.lastDel
			return ep.Attachment == d.Attachment && (d.Generation.IsZero() || d.Generation == ep.Generation) &&
				(d.NotAfter == nil || !ep.CreatedAt.After(*d.NotAfter))
		}))
	case "POST /v1/gc":
		f.lastGC = &api.GCRequest{}
		if !decode(f.lastGC) {
			return http.StatusBadRequest, nil
		}
		return http.StatusOK, f.collect()
	case "GET /v1/daemon/config":
		return http.StatusOK, api.DaemonConfig{Pools: f.pools}
	case "GET /v1/daemon/health":
		return http.StatusOK, f.health
	}
	f.t.Errorf("fake daemon: unexpected call %s", route)
	return http.StatusNotFound, api.Errorf(api.NotFound, "no route")
}

func (f *fakeDaemon) create(req api.CreateRequest) (int, any) {
	for _, ep := range f.endpoints {
		if ep.Attachment == req.Attachment {
			e := api.Errorf(api.AlreadyExists, "%s is attached already", req.Attachment)
			return e.Code.HTTPStatus(), e
		}
	}
	g := f.generation
	if g.IsZero() {
		g = endpoint.NewGeneration()
	}
	f.generation = endpoint.Generation{}
	slot := f.slot
	if req.Address.IsValid() {
		var err error
		if slot, err = endpoint.DefaultPools.SlotOf(req.Address); err != nil {
			f.t.Errorf("fake daemon: %v", err)
		}
	}
	f.slot++
	a := endpoint.DefaultPools.At(slot)
	boot, err := bootID()
	if err != nil {
		f.t.Error(err)
	}
	ep := endpoint.Endpoint{
		Generation: g, Attachment: req.Attachment, Mode: req.Mode, State: endpoint.Ready,
		Namespace: endpoint.Namespace{BootID: boot, Cookie: fakeCookie, Path: req.NetnsPath},
		Slot:      slot, Subnet: a.Subnet, Gateway: a.Gateway, Address: a.Child, TransitHost: a.TransitHost, TransitPeer: a.TransitPeer,
		HostLink: g.HostLink(), PeerLink: endpoint.PeerLink(0), Chain: g.Chain(), RouteTable: 1000,
		MTUBytes: 1400, Egress: "ens4", EgressAddr: netip.MustParseAddr("10.0.0.5"), Firewall: "nft",
		DNS: req.DNS, HostAccess: req.HostAccess, PodAccess: req.PodAccess, Publishes: req.Publishes, Bandwidth: req.Bandwidth, Pod: req.Pod,
		CreatedAt: time.Now(), UpdatedAt: time.Now(),
	}
	if r := req.IPAM; r != nil {
		ep.IPAM, ep.Subnet, ep.Address, ep.Gateway, ep.Routes = r.Type, r.Address.Masked(), r.Address.Addr(), r.Gateway, r.Routes
		ep.HostLink, ep.PeerLink, ep.MainDefault, ep.MAC, ep.IPMasq = endpoint.PodHostLink(req.ContainerID, req.IfName), req.IfName, true, req.MAC, req.IPMasq
	}
	if req.MTUBytes != 0 {
		ep.MTUBytes = req.MTUBytes
	}
	if ep.DNS.IsZero() {
		ep.DNS = endpoint.DNS{Nameservers: []string{"10.0.0.2"}}
	}
	if st, err := os.Stat(req.NetnsPath); err == nil {
		sys := st.Sys().(*syscall.Stat_t)
		ep.Namespace.Device, ep.Namespace.Inode = sys.Dev, sys.Ino
	}
	f.endpoints = append(f.endpoints, ep)
	if f.onCreate != nil {
		f.onCreate(&ep)
	}
	return http.StatusCreated, ep
}

// remove deletes the i-th endpoint; below 0 there is nothing to delete.
func (f *fakeDaemon) remove(i int) api.DeleteReply {
	if i < 0 {
		return api.DeleteReply{}
	}
	g := f.endpoints[i].Generation
	f.endpoints = slices.Delete(f.endpoints, i, i+1)
	return api.DeleteReply{Deleted: g}
}

func (f *fakeDaemon) collect() api.GCReply {
	reply := api.GCReply{Deleted: []endpoint.Generation{}, Errors: append([]string{}, f.gcErrors...)}
	f.endpoints = slices.DeleteFunc(f.endpoints, func(ep endpoint.Endpoint) bool {
		gone := ep.Network == f.lastGC.Network && f.lastGC.Valid != nil &&
			!slices.Contains(*f.lastGC.Valid, api.GCAttachment{ContainerID: ep.ContainerID, IfName: ep.IfName})
		if gone {
			reply.Deleted = append(reply.Deleted, ep.Generation)
		}
		return gone
	})
	return reply
}

// put adds a record as if another ADD had made it.
func (f *fakeDaemon) put(a endpoint.Attachment) endpoint.Generation {
	f.mu.Lock()
	defer f.mu.Unlock()
	g := endpoint.NewGeneration()
	f.endpoints = append(f.endpoints, endpoint.Endpoint{Generation: g, Attachment: a, State: endpoint.Ready, CreatedAt: time.Now()})
	return g
}

func (f *fakeDaemon) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.endpoints)
}

// called returns the calls so far and forgets them.
func (f *fakeDaemon) called() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	calls := f.calls
	f.calls = nil
	return calls
}

// answerGet looks an endpoint up.
func (f *fakeDaemon) answerGet(g endpoint.Generation) (endpoint.Endpoint, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, ep := range f.endpoints {
		if ep.Generation == g {
			return ep, nil
		}
	}
	return endpoint.Endpoint{}, os.ErrNotExist
}
