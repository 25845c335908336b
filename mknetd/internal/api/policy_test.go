package api_test

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

func (f *fake) ApplyPolicy(_ context.Context, req specapi.PolicyApplyRequest, _ endpoint.Process) (specapi.PolicyChange, error) {
	if strings.Contains(req.Manifest, "wrong") {
		return specapi.PolicyChange{}, &specapi.Error{Code: specapi.InvalidArgument, Message: "the documents are refused", Details: []string{"a", "b"}}
	}
	return specapi.PolicyChange{Results: []specapi.PolicyResult{{PolicyName: specapi.PolicyName{Kind: "SecurityGroup", Name: "web"}, Action: "created"}}, Warnings: []string{"w"}}, nil
}

func (f *fake) DeletePolicy(_ context.Context, req specapi.PolicyDeleteRequest, _ endpoint.Process) (specapi.PolicyChange, error) {
	var out specapi.PolicyChange
	for _, o := range req.Objects {
		if o.Name != "none" {
			out.Results = append(out.Results, specapi.PolicyResult{PolicyName: o, Action: "deleted"})
		}
	}
	return out, nil
}

func (f *fake) Policies(_ context.Context, kind policy.Kind, name string) (specapi.PolicyList, error) {
	if name == "none" {
		return specapi.PolicyList{}, nil
	}
	return specapi.PolicyList{Documents: []specapi.PolicyDocument{{PolicyName: specapi.PolicyName{Kind: string(kind), Name: name}, Source: "api", Number: 1, Manifest: "{}"}}}, nil
}

func (f *fake) ExplainPolicy(_ context.Context, req specapi.ExplainRequest) (specapi.PolicyExplanation, error) {
	from, err := netip.ParseAddr(req.From)
	return specapi.PolicyExplanation{From: from, To: from, Points: []specapi.PolicyPoint{{
		Direction: "egress", Endpoint: from, Allowed: true,
		Steps: []specapi.PolicyStep{{Layer: "NetworkACL", Reason: 301, Name: "acl drop", Policy: "a", Rule: "spec.egress[0]", Priority: 1, Why: "w"}},
	}}}, err
}

func TestPolicyRoutes(t *testing.T) {
	s := serve(t, &fake{})
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		want                     string // a part of the reply
	}{
		{"apply", "POST", "/v1/policy/apply", `{"manifest":"x"}`, 200, `"action":"created"`},
		{"refused", "POST", "/v1/policy/apply", `{"manifest":"wrong"}`, 400, `"details":["a","b"]`},
		{"unknown field", "POST", "/v1/policy/apply", `{"text":"x"}`, 400, `field \"text\" is not known`},
		{"delete by a short kind", "POST", "/v1/policy/delete", `{"objects":[{"kind":"sg","name":"web"}]}`, 200, `"kind":"SecurityGroup","name":"web","action":"deleted"`},
		{"delete what is not there", "POST", "/v1/policy/delete", `{"objects":[{"kind":"acls","name":"none"}]}`, 200, `"results":[]`},
		{"delete nothing", "POST", "/v1/policy/delete", `{"objects":[]}`, 400, "want 1 to 1024"},
		{"delete an unknown kind", "POST", "/v1/policy/delete", `{"objects":[{"kind":"pod","name":"x"}]}`, 400, "objects[0]: needs the kind"},
		{"list", "GET", "/v1/policy?kind=networkacls&name=a", "", 200, `"kind":"NetworkACL","name":"a"`},
		{"list nothing", "GET", "/v1/policy?name=none", "", 200, `"documents":[]`},
		{"list an unknown kind", "GET", "/v1/policy?kind=pod", "", 400, `kind \"pod\" is not known`},
		{"explain", "POST", "/v1/policy/explain", `{"from":"10.0.0.1","to":"10.0.0.2"}`, 200, `"reason":301`},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, _, body := s.do(t, c.method, c.path, c.body)
			if status != c.status || !strings.Contains(string(body), c.want) {
				t.Errorf("got %d %s, want %d with %s", status, body, c.status, c.want)
			}
		})
	}
}
