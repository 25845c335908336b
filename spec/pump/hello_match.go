package pump

import "fmt"

// Field names what two hellos disagree about.
type Field string

// The fields, in the order in which they are compared: the first difference is
// the one that is reported.
const (
	Version            Field = "protocol version"
	Sandbox            Field = "sandbox"
	SandboxGeneration  Field = "sandbox generation"
	EndpointGeneration Field = "endpoint generation"
	Lane               Field = "lane"
)

// MismatchError says that the peer is not the one that was meant. It is never
// cured by a retry. errors.Is matches another *MismatchError by its Field alone
// when that has no values.
type MismatchError struct {
	Field        Field
	Ours, Theirs string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("%s mismatch: ours is %q, the peer's is %q", e.Field, e.Ours, e.Theirs)
}

// Is matches by field, so that errors.Is(err, &MismatchError{Field: Sandbox}) works.
func (e *MismatchError) Is(target error) bool {
	t, ok := target.(*MismatchError)
	return ok && t.Field == e.Field && t.Ours == "" && t.Theirs == ""
}

// Match compares our hello with the peer's. It returns ErrMalformedHello when
// both have the same role, and a *MismatchError naming the first field that
// differs. An agent's zero endpoint generation matches every one.
func Match(ours, theirs Hello) error {
	switch {
	case theirs.MinVersion > ours.MaxVersion || theirs.MaxVersion < ours.MinVersion:
		return &MismatchError{Field: Version, Ours: versionRange(ours.MinVersion, ours.MaxVersion), Theirs: versionRange(theirs.MinVersion, theirs.MaxVersion)}
	case ours.Role == theirs.Role:
		return malformedHello("the peer is a %v too", theirs.Role)
	case ours.Sandbox.ID != theirs.Sandbox.ID:
		return &MismatchError{Field: Sandbox, Ours: ours.Sandbox.ID, Theirs: theirs.Sandbox.ID}
	case ours.Sandbox.Generation != theirs.Sandbox.Generation:
		return &MismatchError{Field: SandboxGeneration, Ours: ours.Sandbox.Generation, Theirs: theirs.Sandbox.Generation}
	case ours.Endpoint != theirs.Endpoint && !ours.Endpoint.IsZero() && !theirs.Endpoint.IsZero():
		return &MismatchError{Field: EndpointGeneration, Ours: ours.Endpoint.String(), Theirs: theirs.Endpoint.String()}
	case ours.Lane != theirs.Lane:
		return &MismatchError{Field: Lane, Ours: fmt.Sprint(ours.Lane), Theirs: fmt.Sprint(theirs.Lane)}
	}
	return nil
}

// Agreed is the highest version that both speak. Call it after Match.
func Agreed(ours, theirs Hello) uint16 { return min(ours.MaxVersion, theirs.MaxVersion) }
