package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"mknet/spec/endpoint"
)

// file is the YAML document. Every scalar key can be overridden; the tag doc is
// the help of its flag.
type file struct {
	Socket            string       `json:"socket" doc:"Unix socket of the API"`
	SocketGroup       string       `json:"socketGroup" doc:"group whose members may call besides root"`
	TCP               *tcpFile     `json:"tcp"`
	StateDir          string       `json:"stateDir" doc:"folder of the endpoint records"`
	DeferredDelDir    string       `json:"deferredDelDir" doc:"folder of the DELs that mk-cni queued"`
	PolicyDir         string       `json:"policyDir" doc:"folder that is watched for policy documents"`
	ChildPool         string       `json:"childPool" doc:"private IPv4 prefix, /12 to /30, that children get their /30 from"`
	TransitPool       string       `json:"transitPool" doc:"IPv4 prefix between host and CNI namespaces"`
	Pools             []poolFile   `json:"pools"`
	Egress            string       `json:"egress" doc:"interface that children leave by (default: that of the default route)"`
	MTU               int          `json:"mtu" doc:"MTU of new endpoints in bytes (0: that of the egress)"`
	Resolver          endpoint.DNS `json:"resolver"`
	MetadataAddresses []string     `json:"metadataAddresses"`
	HostAccess        string       `json:"hostAccess" doc:"what children reach of this host: deny or allow"`
	PodAccess         string       `json:"podAccess" doc:"whether children reach each other and pods: deny or allow"`
	NodeProbes        string       `json:"nodeProbes" doc:"whether what this host itself sends passes the policy of endpoints: deny or allow"`
	ConnectionLimit   *int         `json:"connectionLimit" doc:"conntrack entries of one child (0: no limit)"`
	Quarantine        string       `json:"quarantine" doc:"how long a freed address rests (0: not at all)"`
	ShimGrace         string       `json:"shimGrace" doc:"how long a DEL waits for a live shim before the shim is fenced"`
	AuditInterval     string       `json:"auditInterval" doc:"how often kernel and records are compared and put right; 0 turns it off"`
	MetricsAddress    string       `json:"metricsAddress" doc:"loopback address and port that serve /metrics, /healthz and /readyz (default: none)"`
	Firewall          string       `json:"firewall" doc:"iptables flavour: auto, nft or legacy"`
	Log               logFile      `json:"log"`
}

// poolFile is one range of addresses for ordinary pods.
type poolFile struct {
	Name       string   `json:"name"`
	Prefix     string   `json:"prefix"`
	Gateway    string   `json:"gateway"`    // default: the first address
	Namespaces []string `json:"namespaces"` // of Kubernetes; default: all that no other pool lists
}

type tcpFile struct {
	Address     string `json:"address" doc:"host:port of the TCP listener (mutual TLS)"`
	Certificate string `json:"certificate" doc:"PEM file with mknetd's certificate"`
	Key         string `json:"key" doc:"PEM file with its key"`
	ClientCA    string `json:"clientCA" doc:"PEM file with the CAs of callers"`
}

type logFile struct {
	Level  string `json:"level" doc:"debug, info, warn or error"`
	Format string `json:"format" doc:"text or json"`
}

// Key is one scalar key that can be overridden.
type Key struct {
	Name string // "log.level"
	Flag string // "log-level"
	Doc  string
}

// Keys returns every key that can be overridden, in the order of the document.
func Keys() []Key {
	var keys []Key
	walkKeys(reflect.TypeFor[file](), "", func(path string, f reflect.StructField) {
		if doc := f.Tag.Get("doc"); doc != "" {
			keys = append(keys, Key{Name: path, Flag: kebab(path), Doc: doc})
		}
	})
	return keys
}

// kebab turns "log.clientCA" into "log-client-ca".
func kebab(path string) string {
	var b strings.Builder
	for i := range len(path) {
		switch c := path[i]; {
		case c == '.':
			b.WriteByte('-')
		case c >= 'A' && c <= 'Z':
			if i > 0 && (path[i-1] < 'A' || path[i-1] > 'Z') {
				b.WriteByte('-')
			}
			b.WriteByte(c + 'a' - 'A')
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// walkKeys visits every key of a type, nested ones with their path.
func walkKeys(t reflect.Type, prefix string, visit func(path string, f reflect.StructField)) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		visit(prefix+name, f)
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct {
			walkKeys(inner, prefix+name+".", visit)
		}
	}
}

// fill reads a YAML document over the defaults.
func (f *file) fill(data []byte) []Fault {
	doc, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return []Fault{{Problem: "is not YAML: " + oneLine(err)}}
	}
	if bytes.Equal(bytes.TrimSpace(doc), []byte("null")) {
		return nil // empty, or comments only
	}
	var tree map[string]any
	if err := json.Unmarshal(doc, &tree); err != nil {
		return []Fault{{Problem: "must be a list of keys and values"}}
	}
	known := []string{}
	walkKeys(reflect.TypeFor[file](), "", func(path string, _ reflect.StructField) { known = append(known, path) })
	faults := unknownKeys(tree, "", known)
	if list, ok := tree["pools"].([]any); ok {
		faults = append(faults, unknownPoolKeys(list)...)
	}
	if len(faults) > 0 {
		return faults
	}
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.DisallowUnknownFields()
	if err := dec.Decode(f); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) {
			return []Fault{{Key: wrong.Field, Problem: fmt.Sprintf("is a %s, want %s", wrong.Value, wanted(wrong.Type))}}
		}
		return []Fault{{Problem: oneLine(err)}}
	}
	return nil
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int:
		return "a whole number"
	case reflect.String:
		return "a text (quote it)"
	case reflect.Slice:
		return "a list"
	}
	return "keys and values"
}

// unknownKeys names every key that the document does not have, with the nearest
// one that it has.
func unknownKeys(tree map[string]any, prefix string, known []string) []Fault {
	var faults []Fault
	names := make([]string, 0, len(tree))
	for name := range tree {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		path := prefix + name
		if !slices.Contains(known, path) {
			problem := "is not a key of mknetd's configuration"
			if near := nearest(path, known); near != "" {
				problem += fmt.Sprintf(", did you mean %s?", near)
			}
			faults = append(faults, Fault{Key: path, Problem: problem})
			continue
		}
		if inner, ok := tree[name].(map[string]any); ok {
			faults = append(faults, unknownKeys(inner, path+".", known)...)
		}
	}
	return faults
}

// unknownPoolKeys is unknownKeys for the items of the list of pools.
func unknownPoolKeys(list []any) []Fault {
	var faults []Fault
	for i, item := range list {
		tree, ok := item.(map[string]any)
		if !ok {
			faults = append(faults, Fault{Key: fmt.Sprintf("pools[%d]", i), Problem: "must have name and prefix"})
			continue
		}
		prefix := fmt.Sprintf("pools[%d].", i)
		var known []string
		walkKeys(reflect.TypeFor[poolFile](), prefix, func(path string, _ reflect.StructField) { known = append(known, path) })
		faults = append(faults, unknownKeys(tree, prefix, known)...)
	}
	return faults
}

// nearest returns the known key with the smallest edit distance, case aside;
// empty when none is near enough to be meant.
func nearest(key string, known []string) string {
	best, bound := "", max(2, len(key)/3)
	for _, k := range known {
		if d := distance(strings.ToLower(key), strings.ToLower(k)); d <= bound {
			best, bound = k, d-1
		}
	}
	return best
}

// distance is Levenshtein's.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// override sets single keys by name.
func (f *file) override(overrides []Override) []Fault {
	var faults []Fault
	for _, o := range overrides {
		if strings.HasPrefix(o.Key, "tcp.") && f.TCP == nil {
			f.TCP = new(tcpFile)
		}
		field, ok := lookup(reflect.ValueOf(f).Elem(), o.Key)
		if !ok {
			faults = append(faults, Fault{Key: o.Key, Problem: "is not a key that can be overridden"})
			continue
		}
		if field.Kind() == reflect.Pointer {
			field.Set(reflect.New(field.Type().Elem()))
			field = field.Elem()
		}
		switch field.Kind() {
		case reflect.String:
			field.SetString(o.Value)
		case reflect.Int:
			n, err := strconv.Atoi(o.Value)
			if err != nil {
				faults = append(faults, Fault{Key: o.Key, Problem: fmt.Sprintf("%q is not a whole number", o.Value)})
				continue
			}
			field.SetInt(int64(n))
		default:
			faults = append(faults, Fault{Key: o.Key, Problem: "is not a key that can be overridden"})
		}
	}
	return faults
}

func lookup(v reflect.Value, path string) (reflect.Value, bool) {
	name, rest, nested := strings.Cut(path, ".")
	for i := range v.NumField() {
		tag, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if tag != name {
			continue
		}
		field := v.Field(i)
		if !nested {
			return field, v.Type().Field(i).Tag.Get("doc") != ""
		}
		if field.Kind() == reflect.Pointer {
			field = field.Elem()
		}
		if field.Kind() != reflect.Struct {
			break
		}
		return lookup(field, rest)
	}
	return reflect.Value{}, false
}

func oneLine(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}
