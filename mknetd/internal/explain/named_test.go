package explain_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"mknet/mknetd/internal/doctor"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

var update = flag.Bool("update", false, "rewrite the table in spec/operations.md")

// seen is what each of the five says of one breakage.
type seen struct {
	mode    endpoint.Mode
	name    string
	problem string // as CHECK has it
	by      map[string]bool
}

// The ways to see a breakage, in the order of the table.
var ways = []string{"CHECK", "inventory", "doctor", "metrics", "explain"}

// everybody puts a policy on every endpoint, so that children have programs too.
const everybody = `
{apiVersion: mknet/v1, kind: NetworkACL, metadata: {name: odd}, spec: {ingress: [{priority: 10, action: allow}], egress: [{priority: 10, action: allow}]}}
---
{apiVersion: mknet/v1, kind: SecurityGroup, metadata: {name: odd}, spec: {ingress: [{}]}}
---
{apiVersion: mknet/v1, kind: Attachment, metadata: {name: odd}, spec: {networkACLRef: {name: odd}, pools: [children, pods], securityGroupRefs: [{name: odd}], endpoints: [{network: mknet}]}}
`

// Whatever object of an endpoint somebody breaks, all five name it: each of a
// child's and a pod's objects, on an endpoint of its own; at last those that all
// endpoints share.
func TestEachObjectIsNamed(t *testing.T) {
	b := newBed(t)
	b.policy(t, everybody)
	var victims []victim
	for _, mode := range []endpoint.Mode{endpoint.Multikernel, endpoint.Veth} {
		victims = append(victims, b.victims(t, mode)...)
	}
	if t.Failed() {
		t.FailNow()
	}
	for _, v := range victims {
		v.hurt.do(t, v)
	}
	rows := b.look(t, victims)
	var last []victim
	for _, mode := range []endpoint.Mode{endpoint.Multikernel, endpoint.Veth} {
		v := victims[slices.IndexFunc(victims, func(v victim) bool { return v.Mode == mode })]
		for _, v.hurt = range sharedByAll(v.Endpoint) {
			last = append(last, v)
		}
	}
	last[0].hurt.do(t, last[0]) // theirs are the same
	rows = append(rows, b.look(t, last)...)
	for _, r := range rows {
		for _, w := range ways {
			if !r.by[w] {
				t.Errorf("%s: %s: %s does not name it (CHECK: %q)", r.mode, r.name, w, r.problem)
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b seen) int { return strings.Compare(string(a.mode), string(b.mode)) })
	if !t.Failed() {
		document(t, rows)
	}
}

// victims makes an endpoint for each breakage.
func (b *bed) victims(t *testing.T, mode endpoint.Mode) []victim {
	t.Helper()
	first := victim{ns: netlab.New(t)}
	first.Endpoint = b.add(t, mode, 0, first)
	all := slices.Concat(breakages(t, first.Endpoint), shapers(first.Endpoint), programsBroken(), entriesBroken())
	mine := make([]victim, len(all))
	mine[0] = first
	for i := range mine[1:] {
		mine[i+1].ns = netlab.New(t)
	}
	for i := range mine {
		mine[i].hurt = all[i]
	}
	var adding sync.WaitGroup
	for lane := range 4 {
		adding.Go(func() {
			for i := lane; i < len(mine); i += 4 {
				if i > 0 {
					mine[i].Endpoint = b.add(t, mode, i, mine[i])
				}
			}
		})
	}
	adding.Wait()
	return mine
}

func (b *bed) add(t *testing.T, mode endpoint.Mode, i int, v victim) endpoint.Endpoint {
	t.Helper()
	config := map[string]any{"mode": string(mode)}
	maps.Copy(config, v.hurt.config)
	return b.AddCall(t, node.Call{ContainerID: fmt.Sprintf("%s%d", mode, i), Netns: v.ns.Path(), IfName: "eth0", Config: config})
}

// look asks everybody about every victim.
func (b *bed) look(t *testing.T, victims []victim) []seen {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*node.Patience)
	defer cancel()
	c := b.Client(t)
	inv, err := c.Inventory(ctx)
	if err != nil {
		t.Fatal(err)
	}
	findings := b.findings(t)
	rows := make([]seen, len(victims))
	var looking sync.WaitGroup
	for lane := range 2 {
		looking.Go(func() {
			for i := lane; i < len(victims); i += 2 {
				rows[i] = b.lookAt(ctx, t, victims[i], inv, findings)
			}
		})
	}
	looking.Wait()
	metrics, err := c.Metrics(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range victims {
		for _, by := range []string{"check", "inventory"} {
			rows[i].by["metrics"] = strings.Contains(string(metrics), fmt.Sprintf(`mknet_faults_found_total{by="%s",kind="%s"}`, by, v.hurt.kind))
		}
	}
	return rows
}

func (b *bed) findings(t *testing.T) []doctor.Finding {
	t.Helper()
	out, err := netlab.Try(b.Daemon, "doctor", "--config", b.Config, "--check", "objects", "-o", "json")
	var r doctor.Report
	// Its exit status is that of errors found; the output before the status's text is JSON.
	if jsonErr := json.NewDecoder(strings.NewReader(out)).Decode(&r); jsonErr != nil || err == nil {
		t.Fatalf("doctor: %v, %v\n%.2000s", err, jsonErr, out)
	}
	return r.Findings
}

func (b *bed) lookAt(ctx context.Context, t *testing.T, v victim, inv api.Inventory, findings []doctor.Finding) seen {
	t.Helper()
	s := seen{mode: v.Mode, name: v.hurt.name, by: map[string]bool{}}
	object := v.hurt.object(v)
	rep, err := b.Client(t).CheckEndpoint(ctx, v.Generation, api.Selector{})
	if err != nil {
		t.Errorf("%s: CHECK: %v", v.ContainerID, err)
		return s
	}
	for _, f := range rep.Faults {
		if f.Kind == v.hurt.kind && f.Object == object {
			s.by["CHECK"], s.problem = true, f.Kind+": "+f.Problem
		}
	}
	for _, it := range inv.Items {
		if it.Generation == v.Generation && it.Kind == v.hurt.kind && it.Object == object && (it.Status == api.Missing || it.Status == api.Altered) {
			s.by["inventory"] = true
		}
	}
	s.by["doctor"] = slices.ContainsFunc(findings, func(f doctor.Finding) bool {
		return strings.HasPrefix(f.What, v.hurt.kind+" "+object+" ") && (v.hurt.shared || strings.Contains(f.What, v.Generation.Short()))
	})
	x, err := b.Client(t).Explain(ctx, api.WayRequest{From: v.Address.String(), To: netlab.InternetAddr})
	if err != nil {
		t.Errorf("%s: explain: %v", v.ContainerID, err)
		return s
	}
	s.by["explain"] = slices.ContainsFunc(x.Faults, func(f endpoint.Fault) bool { return f.Kind == v.hurt.kind && f.Object == object })
	return s
}

const (
	operations = "../../../spec/operations.md"
	tableBegin = "<!-- table of breakages: go test ./mknetd/internal/explain -run Named -update -->\n"
	tableEnd   = "<!-- end of the table of breakages -->\n"
)

// document holds the table in spec/operations.md to what was seen.
func document(t *testing.T, rows []seen) {
	t.Helper()
	text, err := os.ReadFile(operations)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), tableBegin)
	have, tail, ended := strings.Cut(rest, tableEnd)
	if !found || !ended {
		t.Fatalf("%s has no place for the table", operations)
	}
	want := "\n| endpoint | broken by hand | " + strings.Join(ways, " | ") + " |\n|---|---|" + strings.Repeat("---|", len(ways)) + "\n"
	for _, r := range rows {
		want += fmt.Sprintf("| %s | %s |", map[endpoint.Mode]string{endpoint.Multikernel: "child", endpoint.Veth: "pod"}[r.mode], r.name)
		for _, w := range ways {
			want += map[bool]string{true: " named |", false: " no |"}[r.by[w]]
		}
		want += "\n"
	}
	want += "\n"
	switch {
	case have == want:
	case *update:
		if err := os.WriteFile(operations, []byte(head+tableBegin+want+tableEnd+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("the table in %s is stale (run with -update); want\n%s", operations, want)
	}
}
