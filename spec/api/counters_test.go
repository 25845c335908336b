package api

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestCounters(t *testing.T) {
	before := Counters{
		RxPackets: 1, RxBytes: 2, TxPackets: 3, TxBytes: 4, Sessions: 5, Batches: 6, CreditWaits: 7, TransportRetries: 8,
		Drops: []Drops{{"mtu", 9}, {"source_address", 1}}, RTTNanoseconds: 10,
	}
	now := Counters{
		RxPackets: 10, RxBytes: 20, TxPackets: 30, TxBytes: 40, Sessions: 50, Batches: 60, CreditWaits: 70, TransportRetries: 80,
		Drops: []Drops{{"gso_size", 7}, {"mtu", 90}, {"zero", 0}}, RTTNanoseconds: 100,
	}
	want := Counters{
		RxPackets: 11, RxBytes: 22, TxPackets: 33, TxBytes: 44, Sessions: 55, Batches: 66, CreditWaits: 77, TransportRetries: 88,
		Drops: []Drops{{"gso_size", 7}, {"mtu", 99}, {"source_address", 1}, {"zero", 0}}, RTTNanoseconds: 100,
	}
	if got := now.Plus(before); !reflect.DeepEqual(got, want) {
		t.Errorf("sum %+v, want %+v", got, want)
	}
	if got := (Counters{}).Plus(before); !reflect.DeepEqual(got, before) {
		t.Errorf("a shim that begins has %+v, want %+v", got, before)
	}
	if below := now.Plus(before).Below(before); below != "" {
		t.Errorf("a sum is below its part: %s", below)
	}
	// Every total is watched: one less of each must be noticed.
	v := reflect.ValueOf(before)
	for i := range v.NumField() {
		if v.Field(i).Kind() != reflect.Uint64 {
			continue
		}
		c := before
		reflect.ValueOf(&c).Elem().Field(i).SetUint(v.Field(i).Uint() - 1)
		if below := c.Below(before); below == "" {
			t.Errorf("%s went down unnoticed", v.Type().Field(i).Name)
		}
	}
	c := before
	c.Drops = []Drops{{"mtu", 9}}
	if below := c.Below(before); !strings.Contains(below, "source_address") {
		t.Errorf("a reason that is gone: got %q", below)
	}
}

func TestCountersAreBounded(t *testing.T) {
	var many []Drops
	for i := range maxDropReasons + 1 {
		many = append(many, Drops{fmt.Sprintf("r%03d", i), 1})
	}
	for name, c := range map[string]Counters{
		"many reasons": {Drops: many}, "long reason": {Drops: []Drops{{strings.Repeat("a", maxDropReasonBytes+1), 1}}},
		"empty reason": {Drops: []Drops{{"", 1}}}, "line break": {Drops: []Drops{{"a\nb", 1}}}, "negative": {RTTNanoseconds: -1},
		"twice": {Drops: []Drops{{"a", 1}, {"a", 1}}}, "not in order": {Drops: []Drops{{"b", 1}, {"a", 1}}},
	} {
		if err := c.Validate(); !errors.Is(err, &Error{Code: InvalidArgument}) {
			t.Errorf("%s: got %v, want INVALID_ARGUMENT", name, err)
		}
	}
	if err := (Counters{Drops: many[:maxDropReasons]}).Validate(); err != nil {
		t.Error(err)
	}
}
