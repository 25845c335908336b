package main

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"mknet/mknetd/internal/cli"
	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/store"
	"mknet/spec/version"
)

// stateTools are the commands on a store that no daemon has open.
type stateTools struct{}

var _ cli.State = stateTools{}

func (stateTools) Check(cfg config.Config, say func(string)) (bool, error) {
	in, err := store.Inspect(cfg.StateDir, cfg.Pools)
	if err != nil {
		return false, err
	}
	for _, f := range in.Faults {
		say(f.Fault())
	}
	if !in.Whole {
		say("pages are damaged: whether indices and records agree was not looked at")
	}
	say(fmt.Sprintf("store %s: schema %d, %d endpoints, %d freed slots, %d documents: %d faults",
		in.Path, in.Schema, len(in.Content.Endpoints), len(in.Content.Freed), len(in.Content.Documents), len(in.Faults)))
	return len(in.Faults) == 0, nil
}

func (stateTools) Export(cfg config.Config, to io.Writer, say func(string)) (bool, error) {
	in, err := store.Inspect(cfg.StateDir, cfg.Pools)
	if err != nil {
		return false, err
	}
	in.Content.ExportedAt = time.Now().UTC().Truncate(time.Second)
	enc := json.NewEncoder(to)
	enc.SetIndent("", "  ")
	if err := enc.Encode(in.Content); err != nil {
		return false, fmt.Errorf("write the document: %w", err)
	}
	for _, what := range in.Content.LeftOut {
		say("left out: " + what)
	}
	if len(in.Content.LeftOut) > 0 {
		say("kernel objects of an endpoint that is left out are removed when mknetd starts on an import of this document")
	}
	return len(in.Content.LeftOut) == 0, nil
}

func (stateTools) Import(cfg config.Config, from io.Reader, force bool, say func(string)) error {
	doc, err := store.ReadDocument(from)
	if err != nil {
		return err
	}
	kept, err := store.Import(cfg.StateDir, doc, version.Version, force)
	if kept != "" {
		say("the store that was there is kept as " + kept)
	}
	if err != nil {
		return err
	}
	say(fmt.Sprintf("imported %d endpoints, %d freed slots, %d documents", len(doc.Endpoints), len(doc.Freed), len(doc.Documents)))
	if len(doc.LeftOut) > 0 {
		say(fmt.Sprintf("the export had to leave out %d things, see leftOut in the document", len(doc.LeftOut)))
	}
	return nil
}
