package cli

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

func (d *daemon) ApplyPolicy(_ context.Context, req specapi.PolicyApplyRequest, _ endpoint.Process) (specapi.PolicyChange, error) {
	objects, err := policy.Parse([]byte(req.Manifest))
	if err != nil {
		return specapi.PolicyChange{}, err
	}
	if objects[0].Key().Name == "refuse" {
		return specapi.PolicyChange{}, &specapi.Error{Code: specapi.InvalidArgument, Message: "m", Details: []string{"SecurityGroup/refuse: spec: fault one", "fault two"}}
	}
	var out specapi.PolicyChange
	for _, o := range objects {
		out.Results = append(out.Results, specapi.PolicyResult{PolicyName: specapi.PolicyName{Kind: string(o.Key().Kind), Name: o.Key().Name}, Action: "created"})
	}
	out.Warnings = []string{"not enforced yet"}
	return out, nil
}

func (d *daemon) DeletePolicy(_ context.Context, req specapi.PolicyDeleteRequest, _ endpoint.Process) (specapi.PolicyChange, error) {
	var out specapi.PolicyChange
	for _, o := range req.Objects {
		out.Results = append(out.Results, specapi.PolicyResult{PolicyName: o, Action: "deleted"})
	}
	return out, nil
}

func (d *daemon) Policies(_ context.Context, kind policy.Kind, name string) (specapi.PolicyList, error) {
	if name == "none" {
		return specapi.PolicyList{}, nil
	}
	return specapi.PolicyList{Documents: []specapi.PolicyDocument{{
		PolicyName: specapi.PolicyName{Kind: "SecurityGroup", Name: "web"}, Source: "api", Number: 3,
		Manifest: `{"apiVersion":"mknet/v1","kind":"SecurityGroup","metadata":{"name":"web"},"spec":{}}`,
	}}}, nil
}

func (d *daemon) ExplainPolicy(_ context.Context, req specapi.ExplainRequest) (specapi.PolicyExplanation, error) {
	a := netip.MustParseAddr("10.0.0.1")
	return specapi.PolicyExplanation{From: a, To: a, Points: []specapi.PolicyPoint{{Direction: "ingress", Endpoint: a, Steps: []specapi.PolicyStep{
		{Layer: "SecurityGroup", Reason: 303, Name: "sg drop", Policy: "web", Why: req.From + " " + req.Protocol},
	}}}}, nil
}

func TestPolicyCommands(t *testing.T) {
	flags := started(t, &daemon{})
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "p.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	group := func(name string) string {
		return "apiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: " + name + "}\nspec: {}\n"
	}
	for _, c := range []struct {
		name           string
		args           []string
		status         int
		stdout, stderr string // parts
	}{
		{"apply two files", []string{"apply", "-f", file(group("web")), "-f", file(group("db"))}, ExitOK, "securitygroup/web created\nsecuritygroup/db created\n", "warning: not enforced yet"},
		{"a fault that the command finds", []string{"apply", "-f", file(group("web") + "---\nkind: X\n")}, ExitUsage, "", "kind: is \"X\""},
		{"faults that the daemon finds", []string{"apply", "-f", file(group("refuse"))}, ExitRefused, "", "  SecurityGroup/refuse: spec: fault one\n  fault two\n"},
		{"no file", []string{"apply", "-f", "/nowhere"}, ExitUsage, "", "/nowhere"},
		{"get", []string{"get", "sg"}, ExitOK, "SecurityGroup  web   api     3", ""},
		{"get yaml", []string{"get", "-o", "yaml"}, ExitOK, "kind: List", ""},
		{"get none", []string{"get", "sg/none"}, ExitRefused, "", "no such document"},
		{"get an unknown kind", []string{"get", "pods"}, ExitUsage, "", `kind "pods"`},
		{"delete", []string{"delete", "acl/a", "attachment/t"}, ExitOK, "networkacl/a deleted\nattachment/t deleted\n", ""},
		{"delete without a name", []string{"delete", "acl"}, ExitUsage, "", "give KIND/NAME"},
		{"explain", []string{"explain", "--from", "ns/a", "--to", "10.0.0.1", "--port", "80"}, ExitOK, "ingress  10.0.0.1  303 sg drop  web  ns/a tcp\n10.0.0.1 -> 10.0.0.1: denied\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, stdout, stderr := run(t, Program{}, append(append([]string{"policy"}, c.args...), flags...)...)
			if status != c.status || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
				t.Errorf("got %d\n%s\n%s\nwant %d\n%s\n%s", status, stdout, stderr, c.status, c.stdout, c.stderr)
			}
		})
	}
	// What get prints, apply takes.
	_, text, _ := run(t, Program{}, append([]string{"policy", "get", "-o", "yaml"}, flags...)...)
	if status, stdout, stderr := run(t, Program{}, append([]string{"policy", "apply", "-f", file(text)}, flags...)...); status != ExitOK || stdout != "securitygroup/web created\n" {
		t.Errorf("round trip: got %d %q %q", status, stdout, stderr)
	}
}
