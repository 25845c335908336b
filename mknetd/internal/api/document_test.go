package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

func document(t *testing.T) (*api.Document, map[string]api.Operation) {
	t.Helper()
	doc, err := api.LoadDocument()
	if err != nil {
		t.Fatal(err)
	}
	ops, err := doc.Operations()
	if err != nil {
		t.Fatal(err)
	}
	return doc, ops
}

// The document and the server's table have the same routes, and say the same of
// each.
func TestDocumentHasEveryRoute(t *testing.T) {
	_, ops := document(t)
	served := api.Routes()
	for name := range ops {
		if _, ok := served[name]; !ok {
			t.Errorf("%s: is in the document only", name)
		}
	}
	ids := map[string]string{}
	for name, r := range served {
		op, ok := ops[name]
		if !ok {
			t.Errorf("%s: is not in the document", name)
			continue
		}
		body := "none"
		if op.RequestBody != nil {
			body = "optional"
			if op.RequestBody.Required {
				body = "required"
			}
		}
		var params []string
		for _, p := range op.Parameters {
			params = append(params, p.Name)
		}
		slices.Sort(params)
		if body != r.Body || op.Remote != r.Remote || op.Descriptor != r.Descriptor || !slices.Equal(params, slices.Sorted(slices.Values(r.QueryAllowed))) {
			t.Errorf("%s: the document says body %s, remote %v, descriptor %v, query %v; the server %+v", name, body, op.Remote, op.Descriptor, params, r)
		}
		if _, ok := op.Responses[fmt.Sprint(r.Status)]; !ok || len(op.Responses) != 2 || op.Responses["default"].Ref != "#/components/responses/Error" {
			t.Errorf("%s: responses are %v, want %d and an error", name, op.Responses, r.Status)
		}
		if other, ok := ids[op.ID]; ok || op.ID == "" {
			t.Errorf("%s: operationId %q is that of %q", name, op.ID, other)
		}
		ids[op.ID] = name
	}
}

func TestDocumentHasTheGoTypes(t *testing.T) {
	doc, _ := document(t)
	for _, f := range doc.CompareTypes() {
		t.Error(f)
	}
}

func TestDocumentHasTheCodes(t *testing.T) {
	doc, _ := document(t)
	s := doc.Components.Schemas["Code"]
	var want []string
	for _, c := range specapi.Codes() {
		want = append(want, string(c))
		e := specapi.Error{Code: c, Message: "x"}
		if got := s.Codes[string(c)]; got.HTTP != c.HTTPStatus() || got.CNI != e.CNICode() {
			t.Errorf("%s: the document says %+v, want %d and %d", c, got, c.HTTPStatus(), e.CNICode())
		}
	}
	if !slices.Equal(s.Enum, want) || len(s.Codes) != len(want) {
		t.Errorf("codes: the document has %q, want %q", s.Enum, want)
	}
	for _, e := range []struct {
		schema string
		want   []string
	}{
		{"State", []string{string(endpoint.Allocating), string(endpoint.Ready), string(endpoint.Deleting)}},
		{"Mode", []string{string(endpoint.Multikernel), string(endpoint.Veth)}},
		{"Access", []string{string(endpoint.Deny), string(endpoint.Allow), ""}},
		{"EventKind", []string{string(specapi.EventDaemon), string(specapi.EventEndpoint), string(specapi.EventObject), string(specapi.EventLost)}},
		{"Outcome", []string{string(specapi.Passes), string(specapi.Dropped), string(specapi.Broken), string(specapi.Unknown)}},
		{"InventoryStatus", []string{string(specapi.Recorded), string(specapi.Shared), string(specapi.Orphan), string(specapi.Missing), string(specapi.Altered)}},
	} {
		if got := doc.Components.Schemas[e.schema].Enum; !slices.Equal(got, e.want) {
			t.Errorf("%s: the document has %q, want %q", e.schema, got, e.want)
		}
	}
}

// full has every field set that the API can show.
func full() endpoint.Endpoint {
	ep := sample(att)
	now := time.Now().UTC()
	ep.Degraded = []string{"route missing"}
	ep.DeleteRequested = &now
	shim := endpoint.Process{PID: 4, StartTime: 5, UID: 0, Comm: "mk-shim"}
	ep.Binding = &endpoint.Binding{Sandbox: sandbox, BoundAt: now, By: endpoint.Process{PID: 3, StartTime: 4}, Shim: &shim}
	ep.DNS = endpoint.DNS{Nameservers: []string{"1.1.1.1"}, Domain: "d", Search: []string{"s"}, Options: []string{"o"}}
	ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 1, IngressBurst: 2, EgressRate: 3, EgressBurst: 4}
	ep.Pod = endpoint.Pod{Namespace: "ns", Name: "p", UID: "u"}
	ep.EgressAddr = ep.Gateway
	ep.TunUsed, ep.Publishes, ep.MainDefault = true, true, true
	ep.Namespace.Owned = true
	ep.Pool, ep.IPAM, ep.MAC, ep.IPMasq, ep.Routes = "pods", "host-local", endpoint.MAC{2}, true, []netip.Prefix{ep.Subnet}
	return ep
}

// Every route answers what the document promises, with all fields set and with
// as few as there can be, and every error is an Error.
func TestRepliesMatchTheDocument(t *testing.T) {
	doc, ops := document(t)
	gen := endpoint.NewGeneration()
	sb := `"sandboxID":"s","sandboxGeneration":"1"`
	at := `"network":"n","containerID":"c","ifName":"eth0"`
	requests := map[string]string{ // body by operation
		"create": create("ifName", `"eth0"`), "check": `{}`, "bindGeneration": "{" + sb + "}", "unbind": "{" + sb + "}",
		"bind": "{" + at + "," + sb + "}", "deleteSelected": "{" + at + "}", "provision": "{" + at + "," + sb + "}",
		"reportCounters": "{" + sb + `,"counters":{"rxPackets":1,"rxBytes":2,"txPackets":3,"txBytes":4,"drops":[{"reason":"mtu","packets":1}],"sessions":1,"batches":1,"creditWaits":0,"transportRetries":0,"rttNanoseconds":5}}`,
		"release":        `{"generation":"` + gen.String() + `",` + sb + "}", "gc": `{"network":"n","validAttachments":[]}`,
		"allocate":    `{"pod":{"namespace":"default","name":"web"},"ttlSeconds":60}`,
		"applyPolicy": `{"manifest":"{}"}`, "deletePolicy": `{"objects":[{"kind":"sg","name":"web"}]}`, "explainPolicy": `{"from":"10.0.0.1","to":"10.0.0.2"}`,
	}
	requests["check"] = `{` + at + `}`
	requests["trace"] = `{"from":"a","to":"b","protocol":"tcp","port":80,"probe":true,"timeoutSeconds":3}`
	fullEngine := &fake{
		get: func(context.Context, endpoint.Generation) (endpoint.Endpoint, error) { return full(), nil },
		list: func(context.Context, api.Filter) ([]endpoint.Endpoint, error) {
			return []endpoint.Endpoint{full()}, nil
		},
		check: func(context.Context, endpoint.Generation, specapi.Selector) (specapi.CheckReply, error) {
			return specapi.CheckReply{Endpoint: full(), Faults: []endpoint.Fault{{Kind: "k", Object: "o", Where: endpoint.InHost, Problem: "p", Inspect: "ip link"}}}, nil
		},
		counters: func(context.Context, endpoint.Generation) (specapi.CountersReply, error) {
			return specapi.CountersReply{Generation: gen, ReportedAt: time.Now(), Counters: specapi.Counters{RxPackets: 1, Drops: []specapi.Drops{{Reason: "mtu", Packets: 2}}}, Path: []specapi.PathCount{{Outcome: "peer", Packets: 1, Bytes: 98}}}, nil
		},
		gc: func(context.Context, specapi.GCRequest, endpoint.Process) (specapi.GCReply, error) {
			return specapi.GCReply{Deleted: []endpoint.Generation{gen}, Errors: []string{"e"}}, nil
		},
	}
	fullEngine.events = []specapi.Event{{
		Instance: "i", Seq: 3, At: time.Now(), Kind: specapi.EventObject, What: specapi.ObjectMade, Endpoint: att.String(), Generation: gen, State: endpoint.Ready,
		Object: &specapi.ChangedObject{Kind: "veth", Name: "mkv0", Where: endpoint.InHost}, Peer: &endpoint.Process{PID: 4}, Details: map[string]string{"was": "missing"},
	}}
	fullEngine.follow = func(_ context.Context, _ specapi.EventsAfter, send func(specapi.Event) error) error {
		return send(fullEngine.events[0])
	}
	bare := &fake{get: func(context.Context, endpoint.Generation) (endpoint.Endpoint, error) {
		return endpoint.Endpoint{Generation: gen, Attachment: att, Mode: endpoint.Veth, State: endpoint.Allocating}, nil
	}}
	failing := specapi.Error{Code: specapi.StaleGeneration, Message: "m", Details: []string{"d"}}
	for name, engine := range map[string]*fake{"full": fullEngine, "bare": bare} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, engine, func(c *api.Config) {
				c.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "up 1") })
			})
			for op, o := range ops {
				method, path, _ := strings.Cut(op, " ")
				path = strings.ReplaceAll(path, "{generation}", gen.String())
				path = strings.ReplaceAll(path, "{lease}", gen.String())
				if o.ID == "attach" {
					continue // its reply is not a body, see below
				}
				if o.ID == "explain" {
					path += "?from=a&to=b&port=80&sourcePort=40312&size=1400"
				}
				status, _, body := s.do(t, method, path, requests[o.ID])
				response, ok := o.Responses[fmt.Sprint(status)]
				if !ok {
					t.Errorf("%s: status %d: %s", op, status, body)
					continue
				}
				if _, text := response.Content["text/plain"]; text {
					if string(body) != "up 1\n" {
						t.Errorf("%s: %s", op, body)
					}
					continue
				}
				if stream, is := response.Content["application/x-ndjson"]; is {
					for line := range strings.Lines(string(body)) {
						checkBody(t, doc, stream.Schema, op, []byte(line))
					}
					continue
				}
				if len(response.Content) == 0 {
					if len(body) > 0 {
						t.Errorf("%s: a body that the document does not have: %s", op, body)
					}
					continue
				}
				checkBody(t, doc, response.Content["application/json"].Schema, op, body)
				if status, _, body := s.do(t, method, strings.Split(path, "?")[0]+"?no=1", requests[o.ID]); status != 400 {
					t.Errorf("%s: a query that is not known: %d %s", op, status, body)
				} else {
					checkBody(t, doc, api.Schema{Ref: "#/components/schemas/Error"}, op, body)
				}
			}
		})
	}
	t.Run("attach", func(t *testing.T) {
		f, _ := pipes(t, 1, 0)
		rep, files, err := serve(t, f).client(t).Attach(context.Background(), gen, attachRequest(1))
		if err != nil {
			t.Fatal(err)
		}
		defer files[0].Close()
		body, err := json.Marshal(rep)
		if err != nil {
			t.Fatal(err)
		}
		checkBody(t, doc, api.Schema{Ref: "#/components/schemas/AttachReply"}, "attach", body)
	})
	t.Run("errors", func(t *testing.T) {
		body, err := json.Marshal(failing)
		if err != nil {
			t.Fatal(err)
		}
		checkBody(t, doc, api.Schema{Ref: "#/components/schemas/Error"}, "error", body)
		s := serve(t, &fake{}, func(c *api.Config) { c.Limits = api.Limits{Conns: 1} })
		conn := s.dial(t)
		defer conn.Close()
		if _, err := conn.Write([]byte("GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		if _, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil {
			t.Fatal(err)
		}
		_, _, body = s.do(t, "GET", "/v1/inventory", "")
		checkBody(t, doc, api.Schema{Ref: "#/components/schemas/Error"}, "turned away", body)
	})
}

func checkBody(t *testing.T, doc *api.Document, s api.Schema, what string, body []byte) {
	t.Helper()
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		t.Errorf("%s: %v: %s", what, err, body)
		return
	}
	for _, f := range doc.Validate(s, v, what) {
		t.Error(f)
	}
}

// The requests that the tests of the routes send must be what the document asks
// for too.
func TestRequestsMatchTheDocument(t *testing.T) {
	doc, _ := document(t)
	for name, v := range map[string]any{
		"CreateRequest":    specapi.CreateRequest{Attachment: att, Mode: endpoint.Multikernel, NetnsPath: "/n", MTUBytes: 1400, DNS: full().DNS, HostAccess: endpoint.Deny, Bandwidth: full().Bandwidth, Pod: full().Pod},
		"DeleteRequest":    specapi.DeleteRequest{Selector: specapi.Selector{Attachment: att, Namespace: &endpoint.Namespace{BootID: "b", Cookie: 1}}},
		"BindRequest":      specapi.BindRequest{Selector: specapi.Selector{Generation: endpoint.NewGeneration()}, Sandbox: sandbox},
		"AttachRequest":    attachRequest(2),
		"ProvisionRequest": specapi.ProvisionRequest{CreateRequest: specapi.CreateRequest{Attachment: att}, Sandbox: sandbox},
		"CountersReport":   specapi.CountersReport{Sandbox: sandbox, Counters: specapi.Counters{RxPackets: 1, Drops: []specapi.Drops{{Reason: "mtu", Packets: 2}}}},
		"GCRequest":        specapi.GCRequest{Network: "n", Valid: &[]specapi.GCAttachment{{ContainerID: "c", IfName: "e"}}},
	} {
		body, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		checkBody(t, doc, api.Schema{Ref: "#/components/schemas/" + name}, name, body)
	}
}
