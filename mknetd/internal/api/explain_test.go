package api_test

import (
	"strings"
	"testing"
)

// What an explanation is asked with reaches the engine, or is refused by name.
func TestExplainRoute(t *testing.T) {
	s := serve(t, &fake{})
	for _, c := range []struct {
		name, query string
		status      int
		want        string // a part of the reply
	}{
		{"all of it", "from=a&to=b&port=80&sourcePort=40312&size=1400", 200, `"port":80,"sourcePort":40312,"sizeBytes":1400`},
		{"the least", "from=a&to=b", 200, `"protocol":"tcp","way"`},
		{"no destination", "from=a", 400, "from and to are needed"},
		{"port 0", "from=a&to=b&port=0", 400, `port \"0\": must be 1 to 65535`},
		{"no number", "from=a&to=b&sourcePort=http", 400, `sourcePort \"http\"`},
		{"too long", "from=a&to=b&size=70000", 400, `size \"70000\"`},
		{"an unknown parameter", "from=a&to=b&mtu=9", 400, "mtu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, _, body := s.do(t, "GET", "/v1/explain?"+c.query, "")
			if status != c.status || !strings.Contains(string(body), c.want) {
				t.Errorf("got %d %s, want %d with %s", status, body, c.status, c.want)
			}
		})
	}
}
