package api_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

func itoa(n int) string { return strconv.Itoa(n) }

var (
	att     = endpoint.Attachment{Network: "n", ContainerID: "c", IfName: "eth0"}
	sandbox = endpoint.Sandbox{ID: "s", Generation: "1"}
)

// Every method of the client reaches the engine's of the same name, with the
// request as it was sent and the calling process.
func TestClientAndServer(t *testing.T) {
	ctx := context.Background()
	gen := endpoint.NewGeneration()
	var got shared[any]
	var who shared[endpoint.Process]
	f := &fake{
		create: func(_ context.Context, r specapi.CreateRequest, ns *os.File, p endpoint.Process) (endpoint.Endpoint, error) {
			got.set(r)
			who.set(p)
			closeNS(ns)
			return sample(r.Attachment), nil
		},
		list: func(_ context.Context, flt api.Filter) ([]endpoint.Endpoint, error) {
			got.set(flt)
			return []endpoint.Endpoint{sample(att)}, nil
		},
		check: func(_ context.Context, g endpoint.Generation, s specapi.Selector) (specapi.CheckReply, error) {
			got.set(s)
			ep := sample(att)
			ep.Generation = g
			return specapi.CheckReply{Endpoint: ep, Faults: []endpoint.Fault{{Kind: "route", Object: "r", Where: endpoint.InHost, Problem: "missing"}}}, nil
		},
		del: func(_ context.Context, r specapi.DeleteRequest, ns *os.File, p endpoint.Process) (specapi.DeleteReply, error) {
			got.set(r)
			who.set(p)
			closeNS(ns)
			return specapi.DeleteReply{Deleted: r.Generation}, nil
		},
		bind: func(_ context.Context, r specapi.BindRequest, ns *os.File, p endpoint.Process) (specapi.BindReply, error) {
			got.set(r)
			who.set(p)
			closeNS(ns)
			return bound(r.Selector.Generation, r.Sandbox), nil
		},
		unbind: func(_ context.Context, _ endpoint.Generation, r specapi.UnbindRequest, p endpoint.Process) error {
			got.set(r)
			who.set(p)
			return nil
		},
		gc: func(_ context.Context, r specapi.GCRequest, _ endpoint.Process) (specapi.GCReply, error) {
			got.set(r)
			return specapi.GCReply{Deleted: []endpoint.Generation{gen}}, nil
		},
	}
	s := serve(t, f)
	c := s.client(t)
	now := time.Now().UTC()
	ns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	create := specapi.CreateRequest{Attachment: att, Mode: endpoint.Multikernel, NetnsPath: "/run/netns/a", MTUBytes: 1400, Pod: endpoint.Pod{Name: "p"}}
	for _, step := range []struct {
		name string
		call func() (any, error)
		want any // what the engine gets; nil: not asked
	}{
		{"health", func() (any, error) { return c.Health(ctx) }, nil},
		{"config", func() (any, error) { return c.Config(ctx) }, nil},
		{"create", func() (any, error) { return c.CreateEndpoint(ctx, create, ns) }, create},
		{"create by path", func() (any, error) { return c.CreateEndpoint(ctx, create, nil) }, create},
		{"list", func() (any, error) {
			return c.Endpoints(ctx, client.Filter{Network: "n", ContainerID: "c", IfName: "e", State: endpoint.Ready, SandboxID: "s"})
		}, api.Filter{Network: "n", ContainerID: "c", IfName: "e", State: endpoint.Ready, SandboxID: "s"}},
		{"get", func() (any, error) { return c.GetEndpoint(ctx, gen) }, nil},
		{"check", func() (any, error) { return c.CheckEndpoint(ctx, gen, specapi.Selector{Attachment: att}) }, specapi.Selector{Generation: gen, Attachment: att}},
		{"check without a selector", func() (any, error) { return c.CheckEndpoint(ctx, gen, specapi.Selector{}) }, specapi.Selector{}},
		{"delete a generation", func() (any, error) { return c.DeleteEndpoint(ctx, gen) }, specapi.DeleteRequest{Selector: specapi.Selector{Generation: gen}}},
		{"delete", func() (any, error) {
			return c.Delete(ctx, specapi.DeleteRequest{Selector: specapi.Selector{Attachment: att}, NotAfter: &now}, ns)
		}, specapi.DeleteRequest{Selector: specapi.Selector{Attachment: att}, NotAfter: &now}},
		{"bind", func() (any, error) {
			return c.Bind(ctx, specapi.BindRequest{Selector: specapi.Selector{Generation: gen}, Sandbox: sandbox})
		}, specapi.BindRequest{Selector: specapi.Selector{Generation: gen}, Sandbox: sandbox}},
		{"bind by a descriptor", func() (any, error) { return c.BindIn(ctx, specapi.BindRequest{Sandbox: sandbox}, ns) }, specapi.BindRequest{Sandbox: sandbox}},
		{"unbind", func() (any, error) { return nil, c.Unbind(ctx, gen, specapi.UnbindRequest{Sandbox: sandbox}) }, specapi.UnbindRequest{Sandbox: sandbox}},
		{"provision", func() (any, error) {
			return c.Provision(ctx, specapi.ProvisionRequest{CreateRequest: specapi.CreateRequest{Attachment: att}, Sandbox: sandbox})
		}, nil},
		{"release", func() (any, error) { return c.Release(ctx, specapi.ReleaseRequest{Generation: gen, Sandbox: sandbox}) }, nil},
		{"gc", func() (any, error) { return c.GC(ctx, specapi.GCRequest{Network: "n"}) }, specapi.GCRequest{Network: "n"}},
		{"inventory", func() (any, error) { return c.Inventory(ctx) }, nil},
	} {
		got.set(nil)
		who.set(endpoint.Process{PID: -1})
		if _, err := step.call(); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
		if step.want != nil && !reflect.DeepEqual(got.get(), step.want) {
			t.Errorf("%s: the engine got\n%+v, want\n%+v", step.name, got.get(), step.want)
		}
		if p := who.get(); p.PID != -1 && (p.PID != os.Getpid() || p.StartTime == 0 || p.Comm == "" || p.UID != 0) {
			t.Errorf("%s: peer %+v", step.name, p)
		}
	}
}

// What a caller can get wrong, each with the code it is told.
func TestBadRequests(t *testing.T) {
	s := serve(t, &fake{})
	gen := endpoint.NewGeneration().String()
	ep := "/v1/endpoints/" + gen
	long := strings.Repeat("a", 129)
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code                     specapi.Code
		text                     string
	}{
		{"no route", "GET", "/", "", 404, specapi.NotFound, "no such route"},
		{"no version", "GET", "/endpoints", "", 404, specapi.NotFound, ""},
		{"trailing slash", "GET", "/v1/endpoints/", "", 404, specapi.NotFound, ""},
		{"path that would be cleaned", "GET", "//v1/endpoints", "", 404, specapi.NotFound, ""},
		{"wrong method", "PUT", "/v1/endpoints", "", 405, specapi.Unsupported, "GET"},
		{"wrong method below", "GET", ep + "/bind", "", 405, specapi.Unsupported, "POST"},
		{"bad generation", "GET", "/v1/endpoints/xyz", "", 400, specapi.InvalidArgument, "32 lower-case"},
		{"upper case generation", "GET", "/v1/endpoints/" + strings.ToUpper(gen[:31]) + "A", "", 400, specapi.InvalidArgument, ""},
		{"body of a GET", "GET", ep, "{}", 400, specapi.InvalidArgument, "takes no body"},
		{"body of a DELETE", "DELETE", ep, "{}", 400, specapi.InvalidArgument, "takes no body"},
		{"no body", "POST", "/v1/endpoints", "", 400, specapi.InvalidArgument, "body is empty"},
		{"unknown query", "GET", "/v1/endpoints?colour=red", "", 400, specapi.InvalidArgument, "colour"},
		{"repeated query", "GET", "/v1/endpoints?network=a&network=b", "", 400, specapi.InvalidArgument, "2 times"},
		{"query where none is known", "GET", ep + "?network=a", "", 400, specapi.InvalidArgument, ""},
		{"unknown state", "GET", "/v1/endpoints?state=GONE", "", 400, specapi.InvalidArgument, "GONE"},
		{"no JSON", "POST", "/v1/endpoints", "hello", 400, specapi.InvalidArgument, ""},
		{"unknown field", "POST", "/v1/endpoints", `{"networkk":"n"}`, 400, specapi.InvalidArgument, "networkk"},
		{"field twice", "POST", "/v1/endpoints", `{"network":"n","network":"m"}`, 400, specapi.InvalidArgument, "twice"},
		{"two objects", "POST", "/v1/endpoints", `{}{}`, 400, specapi.InvalidArgument, "followed by"},
		{"no attachment", "POST", "/v1/endpoints", `{}`, 400, specapi.InvalidArgument, "network"},
		{"long identifier", "POST", "/v1/endpoints", `{"network":"` + long + `","containerID":"c","ifName":"e"}`, 400, specapi.InvalidArgument, "129 bytes"},
		{"reserved interface", "POST", "/v1/endpoints", create("ifName", `"mkhost0"`), 400, specapi.InvalidArgument, "prefix"},
		{"no namespace", "POST", "/v1/endpoints", `{"network":"n","containerID":"c","ifName":"eth0"}`, 400, specapi.InvalidArgument, "namespace"},
		{"relative namespace", "POST", "/v1/endpoints", create("netnsPath", `"ns"`), 400, specapi.InvalidArgument, "absolute"},
		{"mtu", "POST", "/v1/endpoints", create("mtu", "70000"), 400, specapi.InvalidArgument, "mtu"},
		{"mode", "POST", "/v1/endpoints", create("mode", `"bridge"`), 400, specapi.InvalidArgument, "bridge"},
		{"address", "POST", "/v1/endpoints", create("address", `"::1"`), 400, specapi.InvalidArgument, "IPv4"},
		{"resolver", "POST", "/v1/endpoints", create("dns", `{"nameservers":["a b"]}`), 400, specapi.InvalidArgument, "nameserver"},
		{"access", "POST", "/v1/endpoints", create("hostAccess", `"some"`), 400, specapi.InvalidArgument, "some"},
		{"pod", "POST", "/v1/endpoints", create("pod", `{"name":"a\nb"}`), 400, specapi.InvalidArgument, "pod name"},
		{"nothing to delete by", "POST", "/v1/delete", `{}`, 400, specapi.InvalidArgument, "not named"},
		{"delete by namespace only", "POST", "/v1/delete", `{"netnsPath":"/n"}`, 400, specapi.InvalidArgument, "does not name"},
		{"half an attachment", "POST", "/v1/delete", `{"network":"n"}`, 400, specapi.InvalidArgument, "containerID"},
		{"half a namespace", "POST", "/v1/delete", `{"network":"n","containerID":"c","ifName":"e","namespace":{"bootID":"b","cookie":"0","device":0,"inode":0}}`, 400, specapi.InvalidArgument, "cookie"},
		{"bind nothing", "POST", "/v1/bind", `{"sandboxID":"s","sandboxGeneration":"1"}`, 400, specapi.InvalidArgument, "not named"},
		{"bind without a sandbox", "POST", ep + "/bind", `{}`, 400, specapi.InvalidArgument, "sandboxID"},
		{"bind another generation", "POST", ep + "/bind", `{"generation":"` + endpoint.NewGeneration().String() + `","sandboxID":"s","sandboxGeneration":"1"}`, 400, specapi.InvalidArgument, "not that of the path"},
		{"check another generation", "POST", ep + "/check", `{"generation":"` + endpoint.NewGeneration().String() + `"}`, 400, specapi.InvalidArgument, "not that of the path"},
		{"unbind nothing", "POST", ep + "/unbind", `{}`, 400, specapi.InvalidArgument, "sandboxID"},
		{"nonce", "POST", ep + "/attach", `{"sandboxID":"s","sandboxGeneration":"1","nonce":"x","queues":1}`, 400, specapi.InvalidArgument, "nonce"},
		{"queues", "POST", ep + "/attach", `{"sandboxID":"s","sandboxGeneration":"1","nonce":"` + strings.Repeat("0", 32) + `","queues":5}`, 400, specapi.InvalidArgument, "queues"},
		{"no upgrade", "POST", ep + "/attach", `{"sandboxID":"s","sandboxGeneration":"1","nonce":"` + strings.Repeat("0", 32) + `","queues":1}`, 400, specapi.InvalidArgument, "Upgrade"},
		{"provision in a namespace", "POST", "/v1/provision", `{"network":"n","containerID":"c","ifName":"e","netnsPath":"/n","sandboxID":"s","sandboxGeneration":"1"}`, 400, specapi.InvalidArgument, "itself"},
		{"provision a pod", "POST", "/v1/provision", `{"network":"n","containerID":"c","ifName":"e","mode":"veth","sandboxID":"s","sandboxGeneration":"1"}`, 400, specapi.InvalidArgument, "veth"},
		{"release nothing", "POST", "/v1/release", `{"sandboxID":"s","sandboxGeneration":"1"}`, 400, specapi.InvalidArgument, "generation"},
		{"gc without a network", "POST", "/v1/gc", `{}`, 400, specapi.InvalidArgument, "network"},
		{"gc with half an entry", "POST", "/v1/gc", `{"network":"n","validAttachments":[{"containerID":"c"}]}`, 400, specapi.InvalidArgument, "every entry"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, e, _ := s.do(t, c.method, c.path, c.body)
			if status != c.status || e.Code != c.code || !strings.Contains(e.Message, c.text) {
				t.Errorf("%s %s %s:\n got %d %s %q\nwant %d %s %q", c.method, c.path, c.body, status, e.Code, e.Message, c.status, c.code, c.text)
			}
			if strings.ContainsAny(e.Message, "\r\n") || e.Retryable {
				t.Errorf("message %q, retryable %v", e.Message, e.Retryable)
			}
		})
	}
	t.Run("a body over the limit", func(t *testing.T) {
		status, _, body := s.ask(t, "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nContent-Length: "+itoa(specapi.MaxBodyBytes+1)+"\r\n\r\n"+strings.Repeat(" ", specapi.MaxBodyBytes+1))
		if status != 400 || !strings.Contains(string(body), "too large") {
			t.Errorf("got %d %s", status, body)
		}
	})
	t.Run("a content type that is not JSON", func(t *testing.T) {
		status, _, body := s.ask(t, "POST /v1/gc HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}")
		if status != 400 || !strings.Contains(string(body), "content type") {
			t.Errorf("got %d %s", status, body)
		}
	})
	t.Run("allowed methods are named", func(t *testing.T) {
		_, h, _ := s.ask(t, "PATCH "+ep+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if got := h.Get("Allow"); got != "GET, DELETE" {
			t.Errorf("Allow: %q", got)
		}
	})
}

// create is a valid CreateRequest with one field set.
func create(field, value string) string {
	fields := map[string]string{"network": `"n"`, "containerID": `"c"`, "ifName": `"eth0"`, "netnsPath": `"/run/netns/a"`}
	fields[field] = value
	var parts []string
	for k, v := range fields {
		parts = append(parts, fmt.Sprintf("%q:%s", k, v))
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// An error of the engine arrives with its code, on one line, whatever it is made of.
func TestErrors(t *testing.T) {
	var give shared[error]
	s := serve(t, &fake{get: func(context.Context, endpoint.Generation) (endpoint.Endpoint, error) {
		return endpoint.Endpoint{}, give.get()
	}})
	c := s.client(t)
	gen := endpoint.NewGeneration()
	for _, tc := range []struct {
		name      string
		err       error
		code      specapi.Code
		retryable bool
		text      string
	}{
		{"its own", specapi.Retryablef(specapi.StaleGeneration, "old"), specapi.StaleGeneration, true, "old"},
		{"wrapped", fmt.Errorf("get: %w", specapi.Errorf(specapi.NotFound, "no such endpoint")), specapi.NotFound, false, "no such endpoint"},
		{"identifier", fmt.Errorf("x: %w", endpoint.ValidateIfName("")), specapi.InvalidArgument, false, "ifName"},
		{"state", endpoint.Deleting.To(gen, endpoint.Ready), specapi.FailedPrecondition, false, "DELETING"},
		{"time", fmt.Errorf("x: %w", context.DeadlineExceeded), specapi.Unavailable, true, "in time"},
		{"descriptors", fmt.Errorf("open: %w", unix.EMFILE), specapi.Unavailable, true, "LimitNOFILE"},
		{"busy", fmt.Errorf("find link eth0: %w", unix.EBUSY), specapi.Unavailable, true, "could not do it now: find link eth0: "},
		{"interrupted dump", fmt.Errorf("list routes: %w", netlink.ErrDumpInterrupted), specapi.Unavailable, true, "list routes"},
		{"kernel's other errors", fmt.Errorf("find link eth0: %w", unix.EINVAL), specapi.Internal, false, "find link eth0"},
		{"any", errors.New("first\nsecond"), specapi.Internal, false, "first; second"},
		{"details", &specapi.Error{Code: specapi.Internal, Message: "m", Details: []string{"a\nb"}}, specapi.Internal, false, "m"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			give.set(tc.err)
			_, err := c.GetEndpoint(context.Background(), gen)
			var e *specapi.Error
			if !errors.As(err, &e) || e.Code != tc.code || e.Retryable != tc.retryable || !strings.Contains(e.Message, tc.text) {
				t.Errorf("got %#v", err)
			}
			if errors.Is(err, client.ErrUnreachable) {
				t.Error("an answer counts as unreachable")
			}
			if e != nil && len(e.Details) > 0 && e.Details[0] != "a; b" {
				t.Errorf("details %q", e.Details)
			}
		})
	}
	for _, code := range specapi.Codes() {
		give.set(specapi.Errorf(code, "x"))
		status, e, _ := s.do(t, http.MethodGet, "/v1/endpoints/"+gen.String(), "")
		if status != code.HTTPStatus() || e.Code != code {
			t.Errorf("code %s: status %d, code %s", code, status, e.Code)
		}
	}
}

// A panic costs one call; the stack is in the log.
func TestPanic(t *testing.T) {
	s := serve(t, &fake{create: func(_ context.Context, _ specapi.CreateRequest, ns *os.File, _ endpoint.Process) (endpoint.Endpoint, error) {
		closeNS(ns)
		panic("oops")
	}})
	c := s.client(t)
	for range 3 {
		_, err := c.CreateEndpoint(context.Background(), specapi.CreateRequest{Attachment: att, NetnsPath: "/n"}, nil)
		if specapi.CodeOf(err) != specapi.Internal {
			t.Errorf("got %v", err)
		}
	}
	if _, err := c.Health(context.Background()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if log := s.log.String(); !strings.Contains(log, "oops") || !strings.Contains(log, "TestPanic") {
		t.Errorf("the log has no stack: %s", log)
	}
}

func TestTraceIsLogged(t *testing.T) {
	s := serve(t, &fake{})
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	for _, tc := range []struct{ sent, want string }{{trace, "trace=" + trace}, {"evil\" x=y", ""}} {
		c, err := client.New(s.socket, client.WithTrace(tc.sent))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		if _, err := c.DeleteEndpoint(context.Background(), endpoint.NewGeneration()); err != nil {
			t.Fatal(err)
		}
		if log := s.log.String(); tc.want != "" && !strings.Contains(log, tc.want) || strings.Contains(log, "evil") {
			t.Errorf("log: %s", log)
		}
	}
}
