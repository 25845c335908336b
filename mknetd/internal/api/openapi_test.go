package api

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Document is spec/api/openapi.yaml, as far as the tests read it.
type Document struct {
	Paths      map[string]map[string]json.RawMessage `json:"paths"`
	Components struct {
		Schemas map[string]Schema `json:"schemas"`
	} `json:"components"`
}

// Operation is one method of a path.
type Operation struct {
	ID         string `json:"operationId"`
	Remote     bool   `json:"x-remote"`
	Descriptor bool   `json:"x-descriptor"`
	Parameters []struct {
		Name string `json:"name"`
	} `json:"parameters"`
	RequestBody *struct {
		Required bool    `json:"required"`
		Content  content `json:"content"`
	} `json:"requestBody"`
	Responses map[string]struct {
		Ref     string  `json:"$ref"`
		Content content `json:"content"`
	} `json:"responses"`
}

type content map[string]struct {
	Schema Schema `json:"schema"`
}

// Schema is the part of JSON Schema that the document uses.
type Schema struct {
	Ref        string            `json:"$ref"`
	AllOf      []Schema          `json:"allOf"`
	Type       string            `json:"type"`
	Format     string            `json:"format"`
	Pattern    string            `json:"pattern"`
	Enum       []string          `json:"enum"`
	Required   []string          `json:"required"`
	Properties map[string]Schema `json:"properties"`
	Items      *Schema           `json:"items"`
	Additional json.RawMessage   `json:"additionalProperties"`
	Codes      map[string]struct {
		HTTP int  `json:"http"`
		CNI  uint `json:"cni"`
	} `json:"x-codes"`
}

// LoadDocument reads the document.
func LoadDocument() (*Document, error) {
	text, err := os.ReadFile("../../../spec/api/openapi.yaml")
	if err != nil {
		return nil, err
	}
	doc := new(Document)
	return doc, yaml.Unmarshal(text, doc)
}

// Operations returns every operation as "METHOD path".
func (d *Document) Operations() (map[string]Operation, error) {
	ops := map[string]Operation{}
	for path, methods := range d.Paths {
		for method, raw := range methods {
			if method == "parameters" {
				continue
			}
			var op Operation
			if err := json.Unmarshal(raw, &op); err != nil {
				return nil, fmt.Errorf("%s %s: %w", method, path, err)
			}
			ops[strings.ToUpper(method)+" "+path] = op
		}
	}
	return ops, nil
}

// RouteInfo is what a route of the server says of itself.
type RouteInfo struct {
	Status       int
	Body         string // "none", "optional", "required"
	Remote       bool
	Descriptor   bool
	QueryAllowed []string
}

// Routes returns the server's table as "METHOD path".
func Routes() map[string]RouteInfo {
	out := map[string]RouteInfo{}
	for _, r := range routes {
		out[r.method+" "+r.path] = RouteInfo{
			Status: r.status, Body: [...]string{"none", "optional", "required"}[r.body], Remote: r.remote, Descriptor: r.ns, QueryAllowed: r.query,
		}
	}
	return out
}

// resolve follows a reference.
func (d *Document) resolve(s Schema) (Schema, string, error) {
	if len(s.AllOf) == 1 {
		s = s.AllOf[0]
	}
	if s.Ref == "" {
		return s, "", nil
	}
	name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/")
	target, found := d.Components.Schemas[name]
	if !ok || !found {
		return Schema{}, "", fmt.Errorf("reference %q leads nowhere", s.Ref)
	}
	return target, name, nil
}

// Validate holds a JSON value to a schema. Fields that the schema does not have
// are faults: the server must not say what its document hides.
func (d *Document) Validate(s Schema, v any, at string) []string {
	s, _, err := d.resolve(s)
	if err != nil {
		return []string{at + ": " + err.Error()}
	}
	bad := func(format string, args ...any) []string { return []string{at + ": " + fmt.Sprintf(format, args...)} }
	switch s.Type {
	case "string":
		text, ok := v.(string)
		switch {
		case !ok:
			return bad("is %T, want a string", v)
		case len(s.Enum) > 0 && !slices.Contains(s.Enum, text):
			return bad("%q is none of %q", text, s.Enum)
		case s.Pattern != "" && !regexp.MustCompile(s.Pattern).MatchString(text):
			return bad("%q does not match %s", text, s.Pattern)
		case s.Format == "date-time":
			if _, err := time.Parse(time.RFC3339Nano, text); err != nil {
				return bad("%v", err)
			}
		}
	case "integer":
		if n, ok := v.(float64); !ok || n != float64(int64(n)) {
			return bad("is %v, want a whole number", v)
		}
	case "boolean":
		if _, ok := v.(bool); !ok {
			return bad("is %T, want true or false", v)
		}
	case "array":
		list, ok := v.([]any)
		if !ok {
			return bad("is %T, want an array", v)
		}
		var faults []string
		for i, e := range list {
			faults = append(faults, d.Validate(*s.Items, e, fmt.Sprintf("%s[%d]", at, i))...)
		}
		return faults
	case "object":
		return d.validateObject(s, v, at)
	default:
		return bad("the schema has type %q", s.Type)
	}
	return nil
}

func (d *Document) validateObject(s Schema, v any, at string) []string {
	fields, ok := v.(map[string]any)
	if !ok {
		return []string{fmt.Sprintf("%s: is %T, want an object", at, v)}
	}
	var faults []string
	for _, r := range s.Required {
		if _, ok := fields[r]; !ok {
			faults = append(faults, at+"."+r+": is missing")
		}
	}
	for name, value := range fields {
		sub, ok := s.Properties[name]
		if !ok && s.Properties == nil && len(s.Additional) > 0 {
			ok = json.Unmarshal(s.Additional, &sub) == nil
		}
		if !ok {
			faults = append(faults, at+"."+name+": is not in the document")
			continue
		}
		faults = append(faults, d.Validate(sub, value, at+"."+name)...)
	}
	return faults
}

// bodies are the Go types of every schema that is an object.
var bodies = []any{
	api.CreateRequest{},
	api.Selector{},
	api.CheckReply{},
	api.DeleteRequest{},
	api.DeleteReply{},
	api.BindRequest{},
	api.BindReply{},
	api.UnbindRequest{},
	api.AttachRequest{},
	api.AttachReply{},
	api.ProvisionRequest{},
	api.ReleaseRequest{},
	api.GCRequest{},
	api.GCAttachment{},
	api.GCReply{},
	api.EndpointList{},
	api.Inventory{},
	api.EventList{},
	api.Explanation{},
	api.ExplainStep{},
	api.TraceRequest{},
	api.TraceLine{},
	api.TraceBegin{},
	api.TraceEvent{},
	api.TraceNote{},
	api.TraceEnd{},
	api.Rule{},
	api.Event{},
	api.ChangedObject{},
	api.InventoryItem{},
	api.DaemonConfig{},
	api.Pool{},
	api.IPAMResult{},
	api.LeaseRequest{},
	api.Lease{},
	api.Health{},
	api.HealthCause{},
	api.Error{},
	api.Counters{},
	api.Drops{},
	api.CountersReport{},
	api.CountersReply{},
	api.PathCount{},
	api.PolicyApplyRequest{},
	api.PolicyName{},
	api.PolicyDeleteRequest{},
	api.PolicyChange{},
	api.PolicyResult{},
	api.PolicyList{},
	api.PolicyDocument{},
	api.ExplainRequest{},
	api.PolicyExplanation{},
	api.PolicyPoint{},
	api.PolicyStep{},
	endpoint.Endpoint{},
	endpoint.Binding{},
	endpoint.Process{},
	endpoint.Namespace{},
	endpoint.Moment{},
	endpoint.DNS{},
	endpoint.Pod{},
	endpoint.Bandwidth{},
	endpoint.Fault{},
}

// attachmentOptional are the schemas that select an endpoint, where an attachment
// is one of several ways.
var attachmentOptional = []string{"Selector", "BindRequest", "DeleteRequest"}

// CompareTypes lists every difference between the schemas and the Go types.
func (d *Document) CompareTypes() []string {
	var faults []string
	seen := map[string]bool{"Generation": true, "MAC": true, "State": true, "Mode": true, "Access": true, "InventoryStatus": true, "EventKind": true, "Outcome": true, "Address": true, "Prefix": true, "Code": true}
	for _, b := range bodies {
		t := reflect.TypeOf(b)
		seen[t.Name()] = true
		s, ok := d.Components.Schemas[t.Name()]
		if !ok {
			faults = append(faults, t.Name()+": has no schema")
			continue
		}
		props := map[string]bool{}
		var required []string
		eachField(t, func(owner reflect.Type, f reflect.StructField) {
			name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
			props[name] = true
			zero := strings.Contains(opts, "omitzero")
			omitted := zero || strings.Contains(opts, "omitempty") && f.Type.Kind() != reflect.Struct // encoding/json omits no struct for being empty
			if owner == reflect.TypeFor[endpoint.Attachment]() && slices.Contains(attachmentOptional, t.Name()) {
				omitted = true
			}
			if !omitted {
				required = append(required, name)
			}
			sub, ok := s.Properties[name]
			if !ok {
				faults = append(faults, t.Name()+"."+name+": is not in the schema")
				return
			}
			faults = append(faults, d.compareType(sub, f.Type, opts, t.Name()+"."+name)...)
		})
		for name := range s.Properties {
			if !props[name] {
				faults = append(faults, t.Name()+"."+name+": is in the schema only")
			}
		}
		slices.Sort(required)
		if got := slices.Sorted(slices.Values(s.Required)); !slices.Equal(got, required) {
			faults = append(faults, fmt.Sprintf("%s: required is %q, the Go type always has %q", t.Name(), got, required))
		}
	}
	for name := range d.Components.Schemas {
		if !seen[name] {
			faults = append(faults, name+": no Go type is compared with it")
		}
	}
	return faults
}

func eachField(t reflect.Type, f func(owner reflect.Type, field reflect.StructField)) {
	for i := range t.NumField() {
		if sf := t.Field(i); sf.Anonymous {
			eachField(sf.Type, f)
		} else {
			f(t, sf)
		}
	}
}

// compareType holds one property to the Go type of its field.
func (d *Document) compareType(s Schema, t reflect.Type, opts, at string) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	target, name, err := d.resolve(s)
	if err != nil {
		return []string{at + ": " + err.Error()}
	}
	var want, wantName string
	switch t {
	case reflect.TypeFor[netip.Addr]():
		want, wantName = "string", "Address"
	case reflect.TypeFor[netip.Prefix]():
		want, wantName = "string", "Prefix"
	case reflect.TypeFor[time.Time]():
		want = "string"
	case reflect.TypeFor[time.Duration](): // of nanoseconds
		want = "integer"
	default:
		switch t.Kind() {
		case reflect.Bool:
			want = "boolean"
		case reflect.Slice:
			want = "array"
		case reflect.Struct, reflect.Map:
			want = "object"
		case reflect.String, reflect.Array: // an array is a generation or a MAC address, which is text
			want = "string"
		default:
			want = "integer"
		}
		if t.PkgPath() != "" {
			wantName = t.Name()
		}
	}
	if strings.Contains(opts, "string") {
		want = "string"
	}
	if target.Type != want || name != wantName {
		return []string{fmt.Sprintf("%s: is %s %s, the Go type is %s %s", at, target.Type, name, want, wantName)}
	}
	if want == "array" && t.Kind() == reflect.Slice {
		return d.compareType(*target.Items, t.Elem(), "", at+"[]")
	}
	return nil
}
