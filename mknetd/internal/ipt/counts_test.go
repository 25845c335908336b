package ipt

import (
	"reflect"
	"testing"
)

func TestParseCounts(t *testing.T) {
	t.Parallel()
	const out = `-N MK-0123456789ab
-A MK-0123456789ab ! -s 172.30.0.2/32 -m comment --comment "mknet a b" -c 3 180 -j DROP
-A MK-0123456789ab-OUT -c 9 9 -j DROP
-A MK-0123456789ab -o eth0 -c 0 0 -j ACCEPT
-A MK-0123456789ab -j DROP
`
	want := []Count{
		{Table: "filter", Chain: "MK-0123456789ab", Number: 1, Rule: `! -s 172.30.0.2/32 -m comment --comment "mknet a b" -j DROP`, Packets: 3},
		{Table: "filter", Chain: "MK-0123456789ab", Number: 2, Rule: "-o eth0 -j ACCEPT"},
		{Table: "filter", Chain: "MK-0123456789ab", Number: 3, Rule: "-j DROP"},
	}
	if got := parseCounts("filter", "MK-0123456789ab", out); !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}
