package policy_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"mknet/spec/policy"
)

const (
	acl        = "apiVersion: mknet/v1\nkind: NetworkACL\nmetadata: {name: a}\nspec:\n"
	group      = "apiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: g}\nspec:\n"
	attachment = "apiVersion: mknet/v1\nkind: Attachment\nmetadata: {name: t}\nspec:\n"
)

func mustParse(t testing.TB, text string) []policy.Object {
	t.Helper()
	objects, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatalf("parse: %v\n%s", err, text)
	}
	return objects
}

func mustSet(t testing.TB, text string) *policy.Set {
	t.Helper()
	set, err := policy.NewSet(mustParse(t, text)...)
	if err != nil {
		t.Fatalf("set: %v\n%s", err, text)
	}
	return set
}

func TestParseRefuses(t *testing.T) {
	rule := acl + "  ingress:\n  - "
	for _, c := range []struct {
		name, text string
		want       []string // the faults, in order
	}{
		{"empty", "# nothing\n---\n", []string{"text: holds no document"}},
		{"not UTF-8", "a: \xff", []string{"text: is not valid UTF-8"}},
		{"not an object", "- 1", []string{"document 1 (line 1): is a list, want an object with apiVersion, kind, metadata and spec"}},
		{"nothing in it", "{}", []string{"document 1 (line 1): apiVersion: is missing", "document 1 (line 1): kind: is missing", "document 1 (line 1): metadata: is missing"}},
		{"version", "apiVersion: v1\nkind: NetworkACL\nmetadata: {name: a}\nspec: {}", []string{`document 1 (line 1): apiVersion: is "v1", want mknet/v1`}},
		{"kind", "apiVersion: mknet/v1\nkind: Pod\nmetadata: {name: a}\nspec: {}", []string{`document 1 (line 1): kind: is "Pod", want NetworkACL or SecurityGroup or Attachment or List`}},
		{"name", "apiVersion: mknet/v1\nkind: NetworkACL\nmetadata: {name: A_b}\nspec: {}", []string{`document 1 (line 1): metadata.name: is "A_b", must be 1 to 63 of a-z, 0-9, '-' and '.', with a letter or digit at both ends`}},
		{"duplicate key", acl + "  ingress: []\n  ingress: []\n", []string{`document 1 (line 1): line 6: key "ingress" already set in map (lines count from its beginning)`}},
		{"second document", acl + "  {}\n---\nkind: 7\n", []string{"document 2 (line 6): apiVersion: is missing", "document 2 (line 6): kind: is 7, want a string in quotes", "document 2 (line 6): metadata: is missing"}},
		{"end marker", acl + "  {}\n...\nkind: 7\n", []string{`document 1 (line 1): has a line "...": separate documents by "---"`}},
		{"unknown field", acl + "  inngress: []\n", []string{"NetworkACL/a: spec.inngress: is not a field here (known: ingress, egress)"}},
		{"field in another case", acl + "  Ingress: []\n", []string{"NetworkACL/a: spec.Ingress: is not a field here (known: ingress, egress)"}},
		{"null", acl + "  ingress:\n", []string{"NetworkACL/a: spec.ingress: is null: leave it out or give it a value"}},
		{"null peer", group + "  ingress:\n  - from:\n", []string{"SecurityGroup/g: spec.ingress[0].from: is null: leave it out or give it a value"}},
		{"no list", acl + "  ingress: {}\n", []string{"NetworkACL/a: spec.ingress: is an object, want a list"}},
		{"empty rule", rule + "{}\n", []string{"NetworkACL/a: spec.ingress[0].priority: is missing, want a number from 1 to 65535", "NetworkACL/a: spec.ingress[0].action: is missing"}},
		{"priority", rule + "{priority: 0, action: allow}\n  - {priority: 65536, action: drop}\n  - {priority: 1.5, action: deny}\n", []string{
			"NetworkACL/a: spec.ingress[0].priority: is 0, want a whole number from 1 to 65535",
			"NetworkACL/a: spec.ingress[1].priority: is 65536, want a whole number from 1 to 65535",
			`NetworkACL/a: spec.ingress[1].action: is "drop", want allow or deny`,
			"NetworkACL/a: spec.ingress[1].priority: 1 is also that of spec.ingress[0]",
			"NetworkACL/a: spec.ingress[2].priority: is 1.5, want a whole number from 1 to 65535",
			"NetworkACL/a: spec.ingress[2].priority: 1 is also that of spec.ingress[0]",
		}},
		{"same priority", rule + "{priority: 7, action: allow}\n  - {priority: 7, action: deny}\n", []string{"NetworkACL/a: spec.ingress[1].priority: 7 is also that of spec.ingress[0]"}},
		{"cidr", rule + "{priority: 1, action: deny, cidr: 10.0.0.1/8}\n  - {priority: 2, action: deny, cidr: 10.0.0.1}\n  - {priority: 3, action: deny, cidr: \"::/0\"}\n  - {priority: 4, action: deny, cidr: x}\n", []string{
			"NetworkACL/a: spec.ingress[0].cidr: is 10.0.0.1/8, which has bits set behind its length: did you mean 10.0.0.0/8",
			`NetworkACL/a: spec.ingress[1].cidr: is an address, want a prefix: "10.0.0.1/32"`,
			"NetworkACL/a: spec.ingress[2].cidr: is ::/0: only IPv4 is supported",
			`NetworkACL/a: spec.ingress[3].cidr: is "x", want an IPv4 prefix such as "10.0.0.0/8"`,
		}},
		{"protocol", rule + "{priority: 1, action: deny, protocol: 256}\n  - {priority: 2, action: deny, protocol: igmp}\n  - {priority: 3, action: deny, protocol: true}\n", []string{
			`NetworkACL/a: spec.ingress[0].protocol: is "256", want all, icmp, tcp, udp, sctp, gre, esp, ah or a number from 0 to 255`,
			`NetworkACL/a: spec.ingress[1].protocol: is "igmp", want all, icmp, tcp, udp, sctp, gre, esp, ah or a number from 0 to 255`,
			"NetworkACL/a: spec.ingress[2].protocol: is true, want all, icmp, tcp, udp, sctp, gre, esp, ah or a number from 0 to 255",
		}},
		{"ports of no protocol", rule + "{priority: 1, action: deny, ports: [{port: 80}]}\n", []string{"NetworkACL/a: spec.ingress[0].ports: need protocol tcp, udp or sctp, and this is all"}},
		{"ports", rule + "{priority: 1, action: deny, protocol: tcp, ports: [{}, {port: 0}, {port: 1, portRange: {from: 1, to: 2}}, {portRange: {from: 9, to: 8}}, {portRange: {from: 9}}, 80, {port: \"80\"}]}\n", []string{
			"NetworkACL/a: spec.ingress[0].ports[0]: needs exactly one of port and portRange",
			"NetworkACL/a: spec.ingress[0].ports[1].port: is 0, want a whole number from 1 to 65535",
			"NetworkACL/a: spec.ingress[0].ports[2]: needs exactly one of port and portRange",
			"NetworkACL/a: spec.ingress[0].ports[3].portRange: goes from 9 down to 8",
			"NetworkACL/a: spec.ingress[0].ports[4].portRange.to: is missing, want a number from 1 to 65535",
			"NetworkACL/a: spec.ingress[0].ports[5]: is 80, want an object with port, portRange",
			`NetworkACL/a: spec.ingress[0].ports[6].port: is "80", want a whole number from 1 to 65535`,
		}},
		{"peers", group + "  egressDefault: drop\n  ingress:\n  - to: []\n  egress:\n  - to: [{}, {cidr: 10.0.0.0/8, securityGroupRef: {name: g}}, {securityGroupRef: g}, {securityGroupRef: {}}]\n", []string{
			`SecurityGroup/g: spec.egressDefault: is "drop", want allow or deny`,
			"SecurityGroup/g: spec.ingress[0].to: is not a field here (known: from, protocol, ports)",
			"SecurityGroup/g: spec.egress[0].to[0]: needs exactly one of cidr and securityGroupRef",
			"SecurityGroup/g: spec.egress[0].to[1]: needs exactly one of cidr and securityGroupRef",
			`SecurityGroup/g: spec.egress[0].to[2].securityGroupRef: is "g", want an object with name`,
			"SecurityGroup/g: spec.egress[0].to[3].securityGroupRef.name: is missing",
		}},
		{"empty attachment", attachment + "  {}\n", []string{"Attachment/t: spec: attaches nothing: give networkACLRef or securityGroupRefs"}},
		{"halves", attachment + "  networkACLRef: {name: a}\n  endpoints: [{name: x}]\n", []string{"Attachment/t: spec: needs subnets or pools for its networkACLRef", "Attachment/t: spec.securityGroupRefs: is missing: endpoints say where groups apply"}},
		{"other halves", attachment + "  securityGroupRefs: [{name: a}, {name: a}]\n  pools: [x, x]\n", []string{
			"Attachment/t: spec.networkACLRef: is missing: subnets and pools say where one applies",
			"Attachment/t: spec.endpoints: is missing: securityGroupRefs need endpoints",
			`Attachment/t: spec.securityGroupRefs: has "a" twice`, `Attachment/t: spec.pools: has "x" twice`,
		}},
		{"selectors", attachment + "  securityGroupRefs: [{name: a}]\n  endpoints: [{}, {name: \"a*b\"}, {name: \"\"}, {network: \"a b\"}, {pod: x}]\n", []string{
			"Attachment/t: spec.endpoints[0]: selects nothing in particular: give network, namespace or name",
			"Attachment/t: spec.endpoints[1].name: has a '*' that is not at its end",
			"Attachment/t: spec.endpoints[2].name: must be 1 to 253 printable ASCII characters without white space",
			"Attachment/t: spec.endpoints[2]: selects nothing in particular: give network, namespace or name",
			"Attachment/t: spec.endpoints[3].network: must be 1 to 253 printable ASCII characters without white space",
			"Attachment/t: spec.endpoints[4].pod: is not a field here (known: network, namespace, name)",
			"Attachment/t: spec.endpoints[4]: selects nothing in particular: give network, namespace or name",
			"Attachment/t: spec.endpoints: has the same selector twice",
		}},
		{"17 groups", attachment + "  endpoints: [{name: x}]\n  securityGroupRefs:\n" + repeat(17, "  - {name: g%d}\n"), []string{"Attachment/t: spec.securityGroupRefs: has 17 groups, an endpoint holds at most 16"}},
		{"twice", acl + "  {}\n---\n" + acl + "  {}\n", []string{"NetworkACL/a: occurs twice"}},
		{"list in a list", `{"apiVersion":"mknet/v1","kind":"List","items":[{"kind":"List"}]}`, []string{"document 1 (line 1): items[0]: is a List inside of a List"}},
		{"1025 rules", acl + "  ingress:\n" + repeat(1025, "  - {priority: %d, action: deny}\n"), []string{"NetworkACL/a: spec.ingress: has 1025 rules, at most 1024 fit"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := policy.Parse([]byte(c.text))
			var refused *policy.Error
			if !errors.As(err, &refused) {
				t.Fatalf("got %v, want faults %q", err, c.want)
			}
			if got := refused.Lines(); !slices.Equal(got, c.want) {
				t.Errorf("faults:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

// repeat formats 1 to n.
func repeat(n int, format string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i+1)
	}
	return b.String()
}

func TestParseBounds(t *testing.T) {
	if _, err := policy.Parse(make([]byte, policy.MaxBytes+1)); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("too large: got %v", err)
	}
	many := strings.Repeat("---\n1\n", 1100)
	var refused *policy.Error
	if _, err := policy.Parse([]byte(many)); !errors.As(err, &refused) || len(refused.Faults) != policy.MaxFaults || refused.More == 0 {
		t.Errorf("many faults: got %v", err)
	}
}

// What we write must mean what we read: JSON, YAML and a List of the documents.
func TestRoundTrip(t *testing.T) {
	text, err := os.ReadFile("testdata/example.yaml")
	if err != nil {
		t.Fatal(err)
	}
	first := mustParse(t, string(text))
	if len(first) != 5 {
		t.Fatalf("got %d documents, want 5", len(first))
	}
	inJSON, err := json.Marshal(map[string]any{"apiVersion": policy.APIVersion, "kind": policy.KindList, "items": first})
	if err != nil {
		t.Fatal(err)
	}
	var inYAML strings.Builder
	for _, o := range first {
		one, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		inYAML.WriteString("---\n" + string(one))
	}
	for name, text := range map[string]string{"json": string(inJSON), "yaml": inYAML.String()} {
		again, err := json.Marshal(mustParse(t, text))
		if err != nil {
			t.Fatal(err)
		}
		want, err := json.Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		if string(again) != string(want) {
			t.Errorf("%s: got\n%s\nwant\n%s", name, again, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	text, err := os.ReadFile("testdata/example.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text))
	f.Add(group + "  ingress: [{from: [{cidr: 0.0.0.0/0}], protocol: 0}]\n")
	f.Add(`{"apiVersion":"mknet/v1","kind":"List","items":[]}`)
	f.Fuzz(func(t *testing.T, text string) {
		objects, err := policy.Parse([]byte(text))
		if err != nil {
			var refused *policy.Error
			if !errors.As(err, &refused) || objects != nil {
				t.Fatalf("got %d documents and %v", len(objects), err)
			}
			return
		}
		doc, err := json.Marshal(map[string]any{"apiVersion": policy.APIVersion, "kind": policy.KindList, "items": objects})
		if err != nil {
			t.Fatal(err)
		}
		if len(objects) == 0 || len(doc) > policy.MaxBytes {
			return
		}
		again, err := policy.Parse(doc)
		if err != nil || len(again) != len(objects) {
			t.Fatalf("what was accepted is refused when written again: %v\n%s", err, doc)
		}
	})
}
