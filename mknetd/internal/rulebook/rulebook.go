// Package rulebook keeps the policy documents that are in force: it checks what is
// to change against all the others, gives each policy its number in the data path,
// and stores every change whole before anybody sees it.
//
// Documents come from two sources, the API and the watched folder. Each changes
// only its own: what a file says is not undone by a call, and the reverse.
package rulebook

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"mknet/spec/policy"
)

// Source is where a document comes from.
type Source string

// The sources.
const (
	API    Source = "api"
	Folder Source = "folder"
)

// MaxNumber is the highest number of a policy in the data path.
const MaxNumber = 4095

// Keeper stores documents by name; *store.Documents is one.
type Keeper interface {
	Each(f func(name string, content []byte) error) error
	Update(put map[string][]byte, remove []string) error
}

// Entry is one document in force.
type Entry struct {
	Object policy.Object
	Source Source
	Number uint32 // 0 for an Attachment
}

// SourceError is returned where a source would change what belongs to the other.
type SourceError struct {
	Key    policy.Key
	Source Source // whose it is
}

func (e *SourceError) Error() string {
	if e.Source == Folder {
		return fmt.Sprintf("%s: comes from the watched folder: change its file", e.Key)
	}
	return fmt.Sprintf("%s: was applied by a call: delete it there first (mknetd policy delete)", e.Key)
}

// Action is what a change did to a document.
type Action string

// The actions.
const (
	Created   Action = "created"
	Changed   Action = "changed"
	Unchanged Action = "unchanged"
	Deleted   Action = "deleted"
)

// Result is what a change did to one document.
type Result struct {
	Key    policy.Key
	Action Action
}

// Book is the documents in force. Its methods are safe for concurrent use; changes
// take turns.
type Book struct {
	keeper Keeper
	pools  policy.Pools

	changing sync.Mutex // held over a whole change

	mu      sync.Mutex
	entries map[policy.Key]Entry
	set     *policy.Set
	last    uint32 // number that was given last
}

// record is a document as it is stored.
type record struct {
	Number   uint32          `json:"number,omitempty"`
	Source   Source          `json:"source"`
	Document json.RawMessage `json:"document"`
}

// Open reads the stored documents. One that cannot be read is an error: to leave it
// out would open what it closes.
func Open(k Keeper, pools policy.Pools) (*Book, error) {
	b := &Book{keeper: k, pools: pools, entries: map[policy.Key]Entry{}}
	numbers := map[uint32]policy.Key{}
	err := k.Each(func(name string, content []byte) error {
		var r record
		if err := json.Unmarshal(content, &r); err != nil {
			return fmt.Errorf("stored policy %s: %w", name, err)
		}
		objects, err := policy.Restore(r.Document)
		if err != nil {
			return fmt.Errorf("stored policy %s: %w", name, err)
		}
		if len(objects) != 1 || objects[0].Key().String() != name {
			return fmt.Errorf("stored policy %s: holds another document", name)
		}
		key := objects[0].Key()
		if numbered(key) {
			other, taken := numbers[r.Number]
			if r.Number == 0 || r.Number > MaxNumber || taken {
				return fmt.Errorf("stored policy %s: has number %d (taken by %q)", name, r.Number, other)
			}
			numbers[r.Number] = key
		}
		b.entries[key] = Entry{Object: objects[0], Source: r.Source, Number: r.Number}
		b.last = max(b.last, r.Number)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if b.set, err = policy.NewSet(b.objects(b.entries)...); err != nil {
		return nil, fmt.Errorf("stored policies: %w", err)
	}
	return b, nil
}

func numbered(k policy.Key) bool { return k.Kind != policy.KindAttachment }

func (b *Book) objects(entries map[policy.Key]Entry) []policy.Object {
	out := make([]policy.Object, 0, len(entries))
	for _, k := range sortedKeys(entries) {
		out = append(out, entries[k].Object)
	}
	return out
}

func sortedKeys(m map[policy.Key]Entry) []policy.Key {
	return slices.SortedFunc(maps.Keys(m), policy.Key.Compare)
}

// Set returns the documents in force.
func (b *Book) Set() *policy.Set {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.set
}

// Numbers returns the numbers of all policies.
func (b *Book) Numbers() map[policy.Key]uint32 {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[policy.Key]uint32{}
	for k, e := range b.entries {
		if numbered(k) {
			out[k] = e.Number
		}
	}
	return out
}

// Entries returns all documents in the order of their keys.
func (b *Book) Entries() []Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]Entry, 0, len(b.entries))
	for _, k := range sortedKeys(b.entries) {
		out = append(out, b.entries[k])
	}
	return out
}

// Check has a fault for every pool that a document in force names and that is not
// configured any more: its endpoints do not get the NetworkACL.
func (b *Book) Check() error { return b.Set().UnknownPools(b.pools) }

// Apply puts documents in force beside those that are, in place of those of the
// same key. With dry nothing is changed. A *policy.Error or *SourceError means that
// nothing was changed.
func (b *Book) Apply(source Source, objects []policy.Object, dry bool) ([]Result, error) {
	return b.change(source, objects, nil, dry)
}

// Delete takes documents out of force. One that is not there is in no result.
func (b *Book) Delete(source Source, keys []policy.Key) ([]Result, error) {
	return b.change(source, nil, keys, false)
}

// Replace makes objects all that a source has.
func (b *Book) Replace(source Source, objects []policy.Object) ([]Result, error) {
	keep := map[policy.Key]bool{}
	for _, o := range objects {
		keep[o.Key()] = true
	}
	var gone []policy.Key
	for _, e := range b.Entries() {
		if e.Source == source && !keep[e.Object.Key()] {
			gone = append(gone, e.Object.Key())
		}
	}
	return b.change(source, objects, gone, false)
}

func (b *Book) change(source Source, objects []policy.Object, remove []policy.Key, dry bool) ([]Result, error) {
	b.changing.Lock()
	defer b.changing.Unlock()
	b.mu.Lock()
	next, last := maps.Clone(b.entries), b.last
	b.mu.Unlock()

	put, gone := map[string][]byte{}, []string{}
	var results []Result
	for _, k := range remove {
		e, ok := next[k]
		if !ok {
			continue
		}
		if e.Source != source {
			return nil, &SourceError{k, e.Source}
		}
		delete(next, k)
		gone = append(gone, k.String())
		results = append(results, Result{k, Deleted})
	}
	for _, o := range objects {
		before, there := next[o.Key()]
		if there && before.Source != source {
			return nil, &SourceError{o.Key(), before.Source}
		}
		doc, err := json.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", o.Key(), err)
		}
		action := Created
		if there {
			action = Changed
			if old, err := json.Marshal(before.Object); err == nil && string(old) == string(doc) {
				results = append(results, Result{o.Key(), Unchanged})
				continue
			}
		}
		e := Entry{Object: o, Source: source, Number: before.Number}
		if !there && numbered(o.Key()) {
			if last, err = freeNumber(next, last); err != nil {
				return nil, err
			}
			e.Number = last
		}
		if put[o.Key().String()], err = json.Marshal(record{e.Number, source, doc}); err != nil {
			return nil, fmt.Errorf("%s: %w", o.Key(), err)
		}
		next[o.Key()] = e
		results = append(results, Result{o.Key(), action})
	}
	set, err := policy.NewSet(b.objects(next)...)
	if err == nil && len(put) > 0 {
		err = set.UnknownPools(b.pools)
	}
	if err != nil || dry || len(put)+len(gone) == 0 {
		return results, err
	}
	if err := b.keeper.Update(put, gone); err != nil {
		return nil, fmt.Errorf("store the policies: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.entries, b.set, b.last = next, set, last
	return results, nil
}

// freeNumber goes round: a number rests as long as possible before another policy
// gets it.
func freeNumber(entries map[policy.Key]Entry, last uint32) (uint32, error) {
	taken := map[uint32]bool{}
	for _, e := range entries {
		taken[e.Number] = true
	}
	for i := range uint32(MaxNumber) {
		if n := (last+i)%MaxNumber + 1; !taken[n] {
			return n, nil
		}
	}
	return 0, errors.New("all policy numbers are taken")
}

// Find returns the documents of a kind (empty: all) with a name (empty: all).
func (b *Book) Find(kind policy.Kind, name string) []Entry {
	return slices.DeleteFunc(b.Entries(), func(e Entry) bool {
		k := e.Object.Key()
		return kind != "" && k.Kind != kind || name != "" && k.Name != name
	})
}

func (r Result) String() string { return strings.ToLower(r.Key.String()) + " " + string(r.Action) }
