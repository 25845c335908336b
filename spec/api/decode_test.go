package api_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"mknet/spec/api"
)

func TestDecode(t *testing.T) {
	deep := strings.Repeat(`{"namespace":`, api.MaxDepth+1) + "1" + strings.Repeat("}", api.MaxDepth+1)
	for _, c := range []struct {
		name, in, want string // want is part of the error; empty: accepted
	}{
		{"all parts", `{"network":"n","containerID":"c","ifName":"eth0","namespace":{"bootID":"b","cookie":"7","device":1,"inode":2}}`, ""},
		{"white space around", " \n{\"network\":\"n\"}\r\n\t ", ""},
		{"empty object", `{}`, ""},
		{"nothing", ``, "is empty"},
		{"null", `null`, "not a JSON object"},
		{"array", `[]`, "not a JSON object"},
		{"string", `"a"`, "not a JSON object"},
		{"unknown field", `{"network":"n","mtuu":1}`, `"mtuu" is not known`},
		{"known field at a wrong level", `{"bootID":"b"}`, "bootID"},
		{"twice", `{"network":"a","network":"b"}`, "occurs twice"},
		{"twice, spelled with an escape", `{"network":"a","netwo\u0072k":"b"}`, "occurs twice"},
		{"twice below", `{"namespace":{"inode":1,"inode":2}}`, "occurs twice"},
		{"other case", `{"Network":"a"}`, "is not known"},
		{"long s of the Kelvin kind", `{"networ` + "\u212a" + `":"a"}`, "is not known"},
		{"second object", `{} {}`, "followed by"},
		{"rubbish after", `{}x`, "followed by"},
		{"cut", `{"network":"a"`, "ends too early"},
		{"wrong type", `{"network":7}`, `field "network": is a number`},
		{"bad generation", `{"generation":"xyz"}`, "32 lower-case"},
		{"bad UTF-8", "{\"network\":\"\xff\"}", "UTF-8"},
		{"too deep", deep, "levels deep"},
		{"value like a name", `{"network":"network","containerID":"network"}`, ""},
		{"names inside an array", `{"network":"n","namespace":null}`, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var sel api.Selector
			err := api.Decode([]byte(c.in), &sel)
			switch {
			case c.want == "" && err != nil:
				t.Errorf("%s: %v", c.in, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%s: got %v, want %q", c.in, err, c.want)
			case err != nil && strings.Contains(err.Error(), "\n"):
				t.Errorf("error has several lines: %q", err)
			}
		})
	}
}

func TestDecodeReplySkipsWhatIsNew(t *testing.T) {
	var r api.DeleteReply
	if err := api.DecodeReply([]byte(`{"deleted":"0123456789abcdef0123456789abcdef","later":{"a":[1]}}`), &r); err != nil || r.Deleted.IsZero() {
		t.Errorf("got %+v, %v", r, err)
	}
	if err := api.DecodeReply([]byte(`{"deleted":"","deleted":""}`), &r); err == nil {
		t.Error("a field that occurs twice was accepted")
	}
}

// FuzzDecode holds Decode to three things: it does not panic, it accepts nothing
// that encoding/json refuses, and what it accepts means the same to both and
// survives being written and read again.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		`{"network":"n","containerID":"c","ifName":"eth0","netnsPath":"/run/netns/a","mtu":1400,"address":"172.30.0.2","dns":{"nameservers":["1.1.1.1"]},"bandwidth":{"ingressRate":1},"pod":{"name":"p"},"sandboxID":"s","sandboxGeneration":"1"}`,
		`{"network":"a","Network":"b"}`, `{"a":{"a":[{}]}}`, `{}{}`, `[`, `{"mtu":1e3}`, `{"address":""}`, "{\"\xff\":1}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var got, plain api.ProvisionRequest
		if err := api.Decode(data, &got); err != nil {
			return
		}
		if err := json.Unmarshal(data, &plain); err != nil {
			t.Fatalf("%q: accepted, encoding/json says %v", data, err)
		}
		if !reflect.DeepEqual(got, plain) {
			t.Fatalf("%q: got %+v, encoding/json %+v", data, got, plain)
		}
		out, err := json.Marshal(got)
		if err != nil {
			t.Fatalf("%q: cannot be written again: %v", data, err)
		}
		var again api.ProvisionRequest
		if err := api.Decode(out, &again); err != nil {
			t.Fatalf("%q: became %q: %v", data, out, err)
		}
		// Compared as text: an empty list and none are written the same.
		if third, err := json.Marshal(again); err != nil || !bytes.Equal(out, third) {
			t.Fatalf("%q: became %q, then %q (%v)", data, out, third, err)
		}
	})
}
