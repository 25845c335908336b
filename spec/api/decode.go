package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// MaxDepth bounds the nesting of a body; the deepest of ours has 6 levels.
const MaxDepth = 32

// Decode reads one JSON object into v, a pointer to a struct, and refuses what
// two readers might understand differently: unknown fields, fields that come
// twice, names in another case, anything after the object, invalid UTF-8, more
// than MaxDepth levels. The error is one line that names the field.
func Decode(data []byte, v any) error { return decode(data, v, true) }

// DecodeReply is Decode for an answer of mknetd: fields that this version does
// not know are skipped, so that a newer daemon may say more.
func DecodeReply(data []byte, v any) error { return decode(data, v, false) }

func decode(data []byte, v any, strict bool) error {
	if !utf8.Valid(data) {
		return errors.New("is not valid UTF-8")
	}
	var known map[string]bool
	if strict {
		known = fieldNames(reflect.TypeOf(v))
	}
	if err := scan(data, known); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if strict {
		dec.DisallowUnknownFields()
	}
	if err := dec.Decode(v); err != nil {
		return plain(err)
	}
	return nil
}

// level is one open object or array of scan.
type level struct {
	object bool
	key    bool            // the next token of the object is a name
	seen   map[string]bool // names in lower case: encoding/json matches them so
}

// scan walks the tokens of exactly one object. known, when not nil, holds every
// name that may occur, in its exact case.
func scan(data []byte, known map[string]bool) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	var stack []level
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) && len(stack) == 0 {
			return errors.New("is empty, want a JSON object")
		}
		if err != nil {
			return plain(err)
		}
		top := len(stack) - 1
		if top < 0 && tok != json.Delim('{') {
			return errors.New("is not a JSON object")
		}
		if name, ok := tok.(string); ok && top >= 0 && stack[top].object && stack[top].key {
			if known != nil && !known[name] {
				return fmt.Errorf("field %q is not known", short(name))
			}
			folded := strings.ToLower(name)
			if stack[top].seen[folded] {
				return fmt.Errorf("field %q occurs twice", short(name))
			}
			stack[top].seen[folded] = true
			stack[top].key = false
			continue
		}
		if top >= 0 && stack[top].object {
			stack[top].key = true // after this value, or after the one that it opens
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			if len(stack) == MaxDepth {
				return fmt.Errorf("is nested more than %d levels deep", MaxDepth)
			}
			l := level{object: tok == json.Delim('{'), key: true}
			if l.object {
				l.seen = map[string]bool{}
			}
			stack = append(stack, l)
		case json.Delim('}'), json.Delim(']'):
			stack = stack[:top]
			if len(stack) == 0 {
				return trailing(data[dec.InputOffset():])
			}
		}
	}
}

func trailing(rest []byte) error {
	if len(bytes.TrimLeft(rest, " \t\r\n")) > 0 {
		return errors.New("is followed by other data")
	}
	return nil
}

// plain takes the wording of encoding/json down to what a caller can act on.
func plain(err error) error {
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong) && wrong.Field != "":
		return fmt.Errorf("field %q: is a %s, want %s", short(jsonPath(wrong.Field)), wrong.Value, wrong.Type.Kind())
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("ends too early")
	}
	return errors.New(strings.TrimPrefix(err.Error(), "json: "))
}

// jsonPath drops the names of embedded Go types from the path of a field: all our
// JSON names begin in lower case.
func jsonPath(field string) string {
	parts := strings.Split(field, ".")
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p != "" && p[0] >= 'A' && p[0] <= 'Z' }), ".")
}

func short(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}

var namesOf sync.Map // reflect.Type -> map[string]bool

// fieldNames collects the JSON names of a type's fields at every level. One flat
// set is enough: encoding/json itself refuses a name at a wrong level.
func fieldNames(t reflect.Type) map[string]bool {
	if m, ok := namesOf.Load(t); ok {
		return m.(map[string]bool)
	}
	names := map[string]bool{}
	collectNames(t, names, map[reflect.Type]bool{})
	namesOf.Store(t, names)
	return names
}

func collectNames(t reflect.Type, names map[string]bool, seen map[reflect.Type]bool) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Array {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || seen[t] {
		return
	}
	seen[t] = true
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported() && !f.Anonymous:
			continue
		case name != "":
			names[name] = true
		case !f.Anonymous:
			names[f.Name] = true
		}
		collectNames(f.Type, names, seen)
	}
}
