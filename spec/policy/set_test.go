package policy_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"mknet/spec/policy"
)

func attach(name, spec string) string {
	return "---\napiVersion: mknet/v1\nkind: Attachment\nmetadata: {name: " + name + "}\nspec: " + spec + "\n"
}

func TestSetRefuses(t *testing.T) {
	b := strings.ReplaceAll(acl, "{name: a}", "{name: b}") + "  {}\n"
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"missing group in a rule", group + "  ingress: [{from: [{cidr: 10.0.0.0/8}, {securityGroupRef: {name: x}}]}]\n  egress: [{to: [{securityGroupRef: {name: gy}}]}]\n", []string{
			`SecurityGroup/g: spec.ingress[0].from[1].securityGroupRef.name: SecurityGroup "x" does not exist`,
			`SecurityGroup/g: spec.egress[0].to[0].securityGroupRef.name: SecurityGroup "gy" does not exist`,
		}},
		{"missing in an attachment", attach("t", "{networkACLRef: {name: x}, subnets: [10.0.0.0/8], securityGroupRefs: [{name: gy}], endpoints: [{name: z}]}"), []string{
			`Attachment/t: spec.securityGroupRefs[0].name: SecurityGroup "gy" does not exist`,
			`Attachment/t: spec.networkACLRef.name: NetworkACL "x" does not exist`,
		}},
		{"two for one subnet", acl + "  {}\n---\n" + b + attach("t1", "{networkACLRef: {name: a}, subnets: [10.0.0.0/8], pools: [p]}") + attach("t2", "{networkACLRef: {name: b}, subnets: [10.0.0.0/9, 10.0.0.0/8], pools: [p]}"), []string{
			`Attachment/t2: spec.subnets[1]: 10.0.0.0/8 has NetworkACL "a" by Attachment "t1"`,
			`Attachment/t2: spec.pools[0]: pool "p" has NetworkACL "a" by Attachment "t1"`,
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := policy.NewSet(mustParse(t, c.text)...)
			var refused *policy.Error
			if !errors.As(err, &refused) || !slices.Equal(refused.Lines(), c.want) {
				t.Errorf("got %v\nwant %q", err, c.want)
			}
		})
	}
	set := mustSet(t, acl+"  {}\n"+attach("t", "{networkACLRef: {name: a}, pools: [p]}"))
	if err := set.UnknownPools(policy.Pools{"q": {}}); err == nil || err.Error() != `Attachment/t: spec.pools[0]: pool "p" is not configured (known: q)` {
		t.Errorf("unknown pool: got %v", err)
	}
}

func TestFor(t *testing.T) {
	var text strings.Builder
	for _, name := range []string{"a", "b", "c"} {
		text.WriteString(strings.ReplaceAll(acl, "{name: a}", "{name: "+name+"}") + "  {}\n---\n")
		text.WriteString(strings.ReplaceAll(group, "{name: g}", "{name: "+name+"}") + "  {}\n---\n")
	}
	text.WriteString(attach("t1", "{networkACLRef: {name: a}, subnets: [10.0.0.0/8], securityGroupRefs: [{name: b}, {name: a}], endpoints: [{namespace: prod}]}"))
	text.WriteString(attach("t2", "{networkACLRef: {name: b}, subnets: [10.1.0.0/16]}"))
	text.WriteString(attach("t3", "{networkACLRef: {name: c}, pools: [wide, same], securityGroupRefs: [{name: c}, {name: b}], endpoints: [{name: web-*}, {network: net, name: db}]}"))
	set := mustSet(t, text.String())
	pools := policy.Pools{"wide": netip.MustParsePrefix("10.0.0.0/7"), "same": netip.MustParsePrefix("10.1.0.0/16")}
	for _, c := range []struct {
		name   string
		e      policy.Endpoint
		acl    string
		groups string
	}{
		{"nothing", policy.Endpoint{Address: netip.MustParseAddr("192.0.2.1")}, "", ""},
		{"pool", policy.Endpoint{Address: netip.MustParseAddr("11.0.0.1"), Name: "web"}, "c", ""},
		{"longest prefix", policy.Endpoint{Address: netip.MustParseAddr("10.2.0.1"), Name: "web-"}, "a", "b c"},
		{"subnet before an equal pool", policy.Endpoint{Address: netip.MustParseAddr("10.1.0.1"), Namespace: "prod"}, "b", "a b"},
		{"all attachments together", policy.Endpoint{Address: netip.MustParseAddr("192.0.2.1"), Namespace: "prod", Name: "web-7"}, "", "a b c"},
		{"network and name", policy.Endpoint{Address: netip.MustParseAddr("192.0.2.1"), Network: "net", Name: "db"}, "", "b c"},
		{"another network", policy.Endpoint{Address: netip.MustParseAddr("192.0.2.1"), Network: "m", Name: "db"}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := set.For(c.e, pools)
			name := ""
			if got.ACL != nil {
				name = got.ACL.Metadata.Name
			}
			if groups := strings.Join(got.GroupNames(), " "); name != c.acl || groups != c.groups {
				t.Errorf("%+v: got %q and %q, want %q and %q", c.e, name, groups, c.acl, c.groups)
			}
		})
	}
}
