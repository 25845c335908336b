package rulebook_test

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"mknet/mknetd/internal/rulebook"
	"mknet/mknetd/internal/store"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

var pools = policy.Pools{policy.ChildPool: netip.MustParsePrefix("172.30.0.0/16")}

func openStore(t *testing.T, dir string) *store.Store {
	t.Helper()
	st, err := store.Open(store.Options{Dir: dir, Pools: endpoint.DefaultPools})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func openBook(t *testing.T, st *store.Store) *rulebook.Book {
	t.Helper()
	docs, err := st.Documents("policy")
	if err != nil {
		t.Fatal(err)
	}
	b, err := rulebook.Open(docs, pools)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func doc(kind policy.Kind, name, spec string) string {
	return fmt.Sprintf("---\napiVersion: mknet/v1\nkind: %s\nmetadata: {name: %s}\nspec: %s\n", kind, name, spec)
}

func parse(t *testing.T, docs ...string) []policy.Object {
	t.Helper()
	objects, err := policy.Parse([]byte(strings.Join(docs, "")))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

func results(rs []rulebook.Result) string {
	var out []string
	for _, r := range rs {
		out = append(out, r.String())
	}
	return strings.Join(out, ", ")
}

func TestLife(t *testing.T) {
	dir := t.TempDir()
	st := openStore(t, dir)
	b := openBook(t, st)
	web, db := doc(policy.KindSecurityGroup, "web", "{}"), doc(policy.KindSecurityGroup, "db", "{ingress: [{from: [{securityGroupRef: {name: web}}]}]}")
	at := doc(policy.KindAttachment, "t", "{securityGroupRefs: [{name: db}], endpoints: [{name: x}]}")
	step := func(name string, want string, rs []rulebook.Result, err error) {
		t.Helper()
		if got := results(rs); err != nil || got != want {
			t.Fatalf("%s: got %q, %v, want %q", name, got, err, want)
		}
	}
	rs, err := b.Apply(rulebook.API, parse(t, web, db, at), true)
	step("dry run", "securitygroup/web created, securitygroup/db created, attachment/t created", rs, err)
	if len(b.Entries()) != 0 {
		t.Fatalf("a dry run left %v", b.Entries())
	}
	rs, err = b.Apply(rulebook.API, parse(t, web, db, at), false)
	step("apply", "securitygroup/web created, securitygroup/db created, attachment/t created", rs, err)
	numbers := b.Numbers()
	rs, err = b.Apply(rulebook.API, parse(t, web, strings.Replace(db, "ingress", "egressDefault: deny, ingress", 1)), false)
	step("again", "securitygroup/web unchanged, securitygroup/db changed", rs, err)

	var refused *policy.Error
	if _, err := b.Delete(rulebook.API, []policy.Key{{Kind: policy.KindSecurityGroup, Name: "db"}}); !errors.As(err, &refused) || !strings.Contains(err.Error(), `Attachment/t: spec.securityGroupRefs[0].name: SecurityGroup "db" does not exist`) {
		t.Errorf("delete what is in use: got %v", err)
	}
	if _, err := b.Apply(rulebook.API, parse(t, doc(policy.KindNetworkACL, "a", "{}"), doc(policy.KindAttachment, "p", "{networkACLRef: {name: a}, pools: [nowhere]}")), false); !errors.As(err, &refused) || len(b.Entries()) != 3 {
		t.Errorf("unknown pool: got %v and %d documents", err, len(b.Entries()))
	}
	var foreign *rulebook.SourceError
	if _, err := b.Apply(rulebook.Folder, parse(t, web), false); !errors.As(err, &foreign) || foreign.Source != rulebook.API {
		t.Errorf("another source: got %v", err)
	}

	// After a restart everything is as it was, numbers included.
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	st = openStore(t, dir)
	b = openBook(t, st)
	if got := b.Numbers(); !maps.Equal(got, numbers) || len(got) != 2 {
		t.Errorf("numbers: got %v, want %v", got, numbers)
	}
	if es := b.Find(policy.KindSecurityGroup, "db"); len(es) != 1 || es[0].Object.(*policy.SecurityGroup).Spec.EgressDefault != policy.Deny {
		t.Errorf("find: got %+v", es)
	}
	rs, err = b.Delete(rulebook.API, []policy.Key{{Kind: policy.KindAttachment, Name: "t"}, {Kind: policy.KindSecurityGroup, Name: "db"}, {Kind: policy.KindSecurityGroup, Name: "none"}})
	step("delete", "attachment/t deleted, securitygroup/db deleted", rs, err)
	rs, err = b.Apply(rulebook.API, parse(t, doc(policy.KindSecurityGroup, "new", "{}")), false)
	step("a number is not given again at once", "securitygroup/new created", rs, err)
	if n := b.Numbers()[policy.Key{Kind: policy.KindSecurityGroup, Name: "new"}]; slices.Contains(slices.Collect(maps.Values(numbers)), n) {
		t.Errorf("number %d was just in use: %v", n, numbers)
	}
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestReplace(t *testing.T) {
	st := openStore(t, t.TempDir())
	defer st.Close()
	b := openBook(t, st)
	one, two := doc(policy.KindSecurityGroup, "one", "{}"), doc(policy.KindSecurityGroup, "two", "{}")
	if _, err := b.Apply(rulebook.API, parse(t, doc(policy.KindSecurityGroup, "mine", "{}")), false); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		docs []string
		want string
	}{
		{[]string{one, two}, "securitygroup/one created, securitygroup/two created"},
		{[]string{one, two}, "securitygroup/one unchanged, securitygroup/two unchanged"},
		{[]string{two}, "securitygroup/one deleted, securitygroup/two unchanged"},
	} {
		rs, err := b.Replace(rulebook.Folder, parse(t, c.docs...))
		if got := results(rs); err != nil || got != c.want {
			t.Errorf("got %q, %v, want %q", got, err, c.want)
		}
	}
	if rs, err := b.Replace(rulebook.Folder, nil); err != nil || results(rs) != "securitygroup/two deleted" || len(b.Entries()) != 1 {
		t.Errorf("got %q, %v, left %v", results(rs), err, b.Entries())
	}
}

// What was stored over a limit is kept: without it the node would be open.
func TestRestoreOverLimit(t *testing.T) {
	st := openStore(t, t.TempDir())
	defer st.Close()
	docs, err := st.Documents("policy")
	if err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat(`{"protocol":"tcp"},`, policy.MaxRules) + `{"protocol":"tcp"}`
	put := func(name, content string) {
		t.Helper()
		if err := docs.Put(name, []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	put("SecurityGroup/big", `{"number":9,"source":"api","document":{"apiVersion":"mknet/v1","kind":"SecurityGroup","metadata":{"name":"big"},"spec":{"ingress":[`+big+`]}}}`)
	if b := openBook(t, st); len(b.Entries()) != 1 || b.Numbers()[policy.Key{Kind: policy.KindSecurityGroup, Name: "big"}] != 9 {
		t.Errorf("got %v", b.Entries())
	}
	for name, content := range map[string]string{
		"SecurityGroup/a": `{"number":9,"source":"api","document":{"apiVersion":"mknet/v1","kind":"SecurityGroup","metadata":{"name":"a"},"spec":{}}}`, // the same number
		"SecurityGroup/b": `{"number":8,"source":"api","document":{"apiVersion":"mknet/v1","kind":"SecurityGroup","metadata":{"name":"x"},"spec":{}}}`, // another name
		"SecurityGroup/c": `{"number":8,"source":"api","document":{"kind":"SecurityGroup"}}`,
		"SecurityGroup/d": `{`,
	} {
		put(name, content)
		if _, err := rulebook.Open(docs, pools); err == nil || !strings.Contains(err.Error(), name) && name != "SecurityGroup/a" {
			t.Errorf("%s: got %v", name, err)
		}
		if err := docs.Delete(name); err != nil {
			t.Fatal(err)
		}
	}
}
