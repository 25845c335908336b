package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"mknet/mknetd/internal/policydir"
	"mknet/mknetd/internal/rulebook"
	"mknet/mknetd/internal/store"
	wire "mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// policyDocuments is the kind under which the store has them.
const policyDocuments = "policy"

// policyPools are the pools that an Attachment may name. No pool of ordinary pods
// is called like that of the children (config).
func policyPools(cfg Config) policy.Pools {
	pools := policy.Pools{}
	for _, p := range cfg.PodPools {
		pools[p.Name] = p.Prefix
	}
	pools[policy.ChildPool] = cfg.Pools.Child
	return pools
}

func openRulebook(st *store.Store, cfg Config) (*rulebook.Book, error) {
	docs, err := st.Documents(policyDocuments)
	if err != nil {
		return nil, err
	}
	return rulebook.Open(docs, policyPools(cfg))
}

// policyEndpoint is what policy knows of an endpoint.
func policyEndpoint(ep endpoint.Endpoint) policy.Endpoint {
	name := ep.Pod.Name
	if name == "" {
		name = ep.ContainerID
	}
	return policy.Endpoint{Address: ep.Address, Network: ep.Network, Namespace: ep.Pod.Namespace, Name: name}
}

// ApplyPolicy puts documents in force, all or none.
func (e *Engine) ApplyPolicy(ctx context.Context, req wire.PolicyApplyRequest, by endpoint.Process) (wire.PolicyChange, error) {
	objects, err := policy.Parse([]byte(req.Manifest))
	if err != nil {
		return wire.PolicyChange{}, policyError(err)
	}
	e.policyMu.Lock()
	defer e.policyMu.Unlock()
	if !req.DryRun {
		if err := e.canEnforce(); err != nil {
			return wire.PolicyChange{}, err
		}
	}
	results, err := e.rules.Apply(rulebook.API, objects, req.DryRun)
	if err != nil {
		return wire.PolicyChange{}, policyError(err)
	}
	if req.DryRun {
		return wire.PolicyChange{Results: wireResults(results)}, nil
	}
	return e.policyChanged(ctx, results, "call", by), nil
}

// DeletePolicy takes documents out of force.
func (e *Engine) DeletePolicy(ctx context.Context, req wire.PolicyDeleteRequest, by endpoint.Process) (wire.PolicyChange, error) {
	keys := make([]policy.Key, len(req.Objects))
	for i, o := range req.Objects {
		keys[i] = policy.Key{Kind: policy.Kind(o.Kind), Name: o.Name}
	}
	e.policyMu.Lock()
	defer e.policyMu.Unlock()
	results, err := e.rules.Delete(rulebook.API, keys)
	var faults *policy.Error
	if errors.As(err, &faults) {
		return wire.PolicyChange{}, &wire.Error{Code: wire.FailedPrecondition, Message: "delete policies: others refer to them: delete these first, or together", Details: faults.Lines()}
	}
	if err != nil {
		return wire.PolicyChange{}, policyError(err)
	}
	return e.policyChanged(ctx, results, "call", by), nil
}

// policyChanged brings the kernel to the documents, which are stored by now, and
// logs what has changed. What the kernel would not take is in the warnings and in
// health, and tried again by the audit. The caller holds policyMu.
func (e *Engine) policyChanged(ctx context.Context, results []rulebook.Result, cause string, by endpoint.Process) wire.PolicyChange {
	for _, r := range results {
		if r.Action != rulebook.Unchanged {
			e.log.Info("policy", "event", string(r.Action), "document", r.Key.String(), "cause", cause, "peerPid", by.PID, "peerComm", by.Comm)
		}
	}
	if err := e.enforceLocked(ctx); err != nil {
		e.log.Error("policy is not in the kernel yet, it is tried again", "err", err)
		e.askForAudit()
	}
	return wire.PolicyChange{Results: wireResults(results), Warnings: e.policyTrouble()}
}

// policyTrouble says why documents in force are not what packets meet, one line a
// cause.
func (e *Engine) policyTrouble() []string {
	var out []string
	if status, ok := e.policyStatus(); ok {
		if status.Err != nil {
			out = append(out, fmt.Sprintf("policy is not in the kernel yet, it is tried again: %v", status.Err))
		}
		out = append(append(out, status.Closed...), status.TooMany...)
	} else if len(e.rules.Entries()) > 0 {
		out = append(out, "policies are kept and explained, not enforced: there is no eBPF data path")
	}
	var faults *policy.Error
	if err := e.rules.Check(); errors.As(err, &faults) {
		out = append(out, faults.Lines()...)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return append(out, e.folderFaults...)
}

// policyDirEvery is how often the folder is looked at; a change is taken after two.
const policyDirEvery = time.Second

// readPolicyDir makes the folder's documents all that it has in force. Where
// anything is wrong, what was in force stays, and health has the faults until a
// later call, of which again says that the folder is as it was, finds none.
func (e *Engine) readPolicyDir(again bool) error {
	objects, err := policydir.Read(e.cfg.PolicyDir)
	if errors.Is(err, fs.ErrNotExist) && !e.hasFolderPolicies() {
		err = nil
	} else if err == nil {
		e.policyMu.Lock()
		var results []rulebook.Result
		if results, err = e.rules.Replace(rulebook.Folder, objects); err == nil {
			e.policyChanged(e.ctx, results, e.cfg.PolicyDir, endpoint.Process{})
		}
		e.policyMu.Unlock()
	}
	var faults []string
	if err != nil {
		for line := range strings.Lines(err.Error()) {
			faults = append(faults, "policy folder: "+strings.TrimSpace(line)+" (its earlier documents stay in force)")
		}
	}
	e.mu.Lock()
	known := again && slices.Equal(faults, e.folderFaults)
	e.folderFaults = faults
	e.mu.Unlock()
	if err != nil && !known {
		e.log.Error("policy folder is not taken, its earlier documents stay in force", "err", err)
	}
	return err
}

func (e *Engine) hasFolderPolicies() bool {
	return slices.ContainsFunc(e.rules.Entries(), func(en rulebook.Entry) bool { return en.Source == rulebook.Folder })
}

func wireResults(results []rulebook.Result) []wire.PolicyResult {
	out := make([]wire.PolicyResult, len(results))
	for i, r := range results {
		out[i] = wire.PolicyResult{PolicyName: wire.PolicyName{Kind: string(r.Key.Kind), Name: r.Key.Name}, Action: string(r.Action)}
	}
	return out
}

// policyError maps what the rulebook refuses.
func policyError(err error) error {
	var (
		faults  *policy.Error
		foreign *rulebook.SourceError
	)
	switch {
	case errors.As(err, &faults):
		return &wire.Error{Code: wire.InvalidArgument, Message: "the documents are refused", Details: faults.Lines()}
	case errors.As(err, &foreign):
		return wire.Errorf(wire.FailedPrecondition, "%s", foreign)
	}
	return err
}

// Policies lists documents in force.
func (e *Engine) Policies(_ context.Context, kind policy.Kind, name string) (wire.PolicyList, error) {
	var out wire.PolicyList
	for _, entry := range e.rules.Find(kind, name) {
		text, err := json.Marshal(entry.Object)
		if err != nil {
			return wire.PolicyList{}, fmt.Errorf("policy %s: %w", entry.Object.Key(), err)
		}
		key := entry.Object.Key()
		out.Documents = append(out.Documents, wire.PolicyDocument{
			PolicyName: wire.PolicyName{Kind: string(key.Kind), Name: key.Name},
			Source:     string(entry.Source), Number: entry.Number, Manifest: string(text),
		})
	}
	return out, nil
}

// ExplainPolicy gives the verdict of the rules on the first packet of a flow.
func (e *Engine) ExplainPolicy(ctx context.Context, req wire.ExplainRequest) (wire.PolicyExplanation, error) {
	var none wire.PolicyExplanation
	a, b, err := e.readyEnds(req.From, req.To, &req.Port)
	if err != nil {
		return none, err
	}
	proto := policy.TCP
	if req.Protocol != "" {
		var ok bool
		if proto, ok = policy.ParseProtocol(req.Protocol); !ok || proto == policy.AnyProtocol {
			return none, wire.Errorf(wire.InvalidArgument, "protocol %q: must be icmp, tcp, udp, sctp, gre, esp, ah or a number from 0 to 255", req.Protocol)
		}
	}
	if req.Port != 0 && !proto.HasPorts() {
		return none, wire.Errorf(wire.InvalidArgument, "port %d: %s has no ports", req.Port, proto)
	}
	world, err := e.policyWorld()
	if err != nil {
		return none, err
	}
	packet := policy.Packet{Source: a.addr, Destination: b.addr, Protocol: uint8(proto), DestinationPort: req.Port}
	if e.cfg.NodeProbes {
		if packet.FromNode, err = e.ofNode(ctx, a.addr); err != nil {
			return none, err
		}
	}
	v := world.Explain(packet)
	out := wire.PolicyExplanation{From: a.addr, To: b.addr, Allowed: v.Allowed}
	for _, p := range v.Points {
		out.Points = append(out.Points, wirePoint(p))
	}
	return out, nil
}

func wirePoint(p policy.Decision) wire.PolicyPoint {
	point := wire.PolicyPoint{Direction: p.Direction.String(), Endpoint: p.Endpoint, Allowed: p.Allowed}
	for _, s := range p.Steps {
		point.Steps = append(point.Steps, wire.PolicyStep{
			Layer: string(s.Layer), Reason: uint16(s.Reason), Name: s.Reason.String(),
			Policy: s.Policy, Rule: s.Rule, Priority: s.Priority, Why: s.Why,
		})
	}
	return point
}

// policyEndpoints are the READY endpoints as policy knows them.
func (e *Engine) policyEndpoints() (all []policy.Endpoint, err error) {
	err = e.store.Each(func(ep endpoint.Endpoint) error {
		if ep.State == endpoint.Ready {
			all = append(all, policyEndpoint(ep))
		}
		return nil
	})
	return all, err
}

// policyWorld is the model of what is in force now.
func (e *Engine) policyWorld() (*policy.World, error) {
	all, err := e.policyEndpoints()
	if err != nil {
		return nil, err
	}
	w := policy.NewWorld(e.rules.Set(), policyPools(e.cfg), all...)
	w.NodeProbes = e.cfg.NodeProbes
	return w, nil
}

// ofNode reports whether an address is one of the node's own.
func (e *Engine) ofNode(ctx context.Context, a netip.Addr) (bool, error) {
	host, err := e.host.Look(ctx, nil)
	return err == nil && host.Has(a), err
}
