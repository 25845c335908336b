package api

import "net/netip"

// PolicyApplyRequest puts policy documents in force: POST /v1/policy/apply -> 200
// PolicyChange. All of them are taken, or none: the error then has one line a fault
// in its details.
type PolicyApplyRequest struct {
	Manifest string `json:"manifest"` // YAML or JSON documents, see spec/policy.md
	DryRun   bool   `json:"dryRun,omitempty"`
}

// PolicyName names a policy document.
type PolicyName struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// PolicyDeleteRequest takes documents out of force: POST /v1/policy/delete -> 200
// PolicyChange, in which those that were not there are missing. What others refer
// to is refused, unless these go too.
type PolicyDeleteRequest struct {
	Objects []PolicyName `json:"objects"`
}

// PolicyChange says what a change has done.
type PolicyChange struct {
	Results  []PolicyResult `json:"results"`
	Warnings []string       `json:"warnings,omitempty"` // stored, but not or not yet enforced
}

// PolicyResult is what became of one document.
type PolicyResult struct {
	PolicyName
	Action string `json:"action"` // "created", "changed", "unchanged" or "deleted"
}

// PolicyList is the answer to GET /v1/policy.
type PolicyList struct {
	Documents []PolicyDocument `json:"documents"`
}

// PolicyDocument is a document in force.
type PolicyDocument struct {
	PolicyName
	Source   string `json:"source"`           // "api" or "folder"
	Number   uint32 `json:"number,omitempty"` // in the data path
	Manifest string `json:"manifest"`         // the document as JSON
}

// ExplainRequest asks for the verdict on the first packet of a flow:
// POST /v1/policy/explain -> 200 PolicyExplanation.
type ExplainRequest struct {
	// Whom: spec/operations.md, "Who is meant". To may have the port.
	From     string `json:"from"`
	To       string `json:"to"`
	Protocol string `json:"protocol,omitempty"` // a name or number; default tcp
	Port     uint16 `json:"port,omitempty"`     // destination port; 0: none, or in To
}

// PolicyExplanation is a verdict and how it came about.
type PolicyExplanation struct {
	From    netip.Addr    `json:"from"`
	To      netip.Addr    `json:"to"`
	Allowed bool          `json:"allowed"`
	Points  []PolicyPoint `json:"points"` // egress of the source, then ingress of the destination, where these are endpoints
}

// PolicyPoint is the verdict of one enforcement point.
type PolicyPoint struct {
	Direction string       `json:"direction"` // "egress" or "ingress"
	Endpoint  netip.Addr   `json:"endpoint"`
	Allowed   bool         `json:"allowed"`
	Steps     []PolicyStep `json:"steps"` // the last one has decided
}

// PolicyStep is what one layer says.
type PolicyStep struct {
	Layer    string `json:"layer"`  // "frame", "NetworkACL" or "SecurityGroup"
	Reason   uint16 `json:"reason"` // see spec/policy-datapath.md
	Name     string `json:"name"`   // of the reason
	Policy   string `json:"policy,omitempty"`
	Rule     string `json:"rule,omitempty"`     // "spec.ingress[3]"; empty: a default
	Priority uint16 `json:"priority,omitempty"` // of a NetworkACL's rule
	Why      string `json:"why"`
}
