package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	specapi "mknet/spec/api"
	"mknet/spec/policy"
)

func (p *Program) policyCommand() *cobra.Command {
	group := &cobra.Command{Use: "policy", Short: "say who may talk to whom", RunE: needCommand}
	group.AddCommand(p.policyApply(), p.policyGet(), p.policyDelete(), p.policyExplain())
	return group
}

func (p *Program) policyApply() *cobra.Command {
	var files configFlags
	var paths []string
	var dry bool
	cmd := &cobra.Command{
		Use: "apply -f FILE", Short: "put policy documents in force, all of them or none", Args: cobra.NoArgs,
		Long: "Apply reads YAML or JSON documents (spec/policy.md); - is standard input. What is wrong is\nsaid with its path, and nothing is changed then.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := readManifests(cmd.InOrStdin(), paths)
			if err != nil {
				return err
			}
			// The same check as the daemon's, for those who have none at hand.
			if _, err := policy.Parse([]byte(text)); err != nil {
				return p.refused(strings.Join(paths, ", "), err)
			}
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			out, err := c.ApplyPolicy(cmd.Context(), specapi.PolicyApplyRequest{Manifest: text, DryRun: dry})
			if err != nil {
				return p.refused(strings.Join(paths, ", "), err)
			}
			p.showChange(out)
			return nil
		},
	}
	files.register(cmd, false)
	cmd.Flags().StringArrayVarP(&paths, "filename", "f", nil, "file with documents, - for standard input; may be given again")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "check against the documents in force and change nothing")
	_ = cmd.MarkFlagRequired("filename") // fails only for a flag that does not exist
	return cmd
}

// readManifests joins files into one stream of documents.
func readManifests(stdin io.Reader, paths []string) (string, error) {
	var text strings.Builder
	for _, path := range paths {
		var data []byte
		var err error
		if path == "-" {
			data, err = io.ReadAll(io.LimitReader(stdin, policy.MaxBytes+1))
		} else {
			data, err = os.ReadFile(path)
		}
		if err != nil {
			return "", err
		}
		if len(data) > policy.MaxBytes {
			return "", fmt.Errorf("%s: has more than %d bytes", path, policy.MaxBytes)
		}
		fmt.Fprintf(&text, "---\n%s\n", data)
	}
	return text.String(), nil
}

// refused writes every fault on a line of its own.
func (p *Program) refused(what string, err error) error {
	var (
		faults *policy.Error
		answer *specapi.Error
		lines  []string
	)
	switch {
	case errors.As(err, &faults):
		lines = faults.Lines()
	case errors.As(err, &answer) && len(answer.Details) > 0:
		lines = answer.Details
	default:
		return err
	}
	fmt.Fprintf(p.Stderr, "mknetd: %s: refused\n", what)
	for _, l := range lines {
		fmt.Fprintln(p.Stderr, " ", l)
	}
	if faults != nil {
		return &exitError{status: ExitUsage}
	}
	return &exitError{status: ExitRefused}
}

func (p *Program) showChange(c specapi.PolicyChange) {
	for _, r := range c.Results {
		fmt.Fprintf(p.Stdout, "%s/%s %s\n", strings.ToLower(r.Kind), r.Name, r.Action)
	}
	for _, w := range c.Warnings {
		fmt.Fprintln(p.Stderr, "mknetd: warning:", w)
	}
}

// kindAndName reads "sg/web", or "sg" and "web".
func kindAndName(args []string) (kind policy.Kind, name string, err error) {
	if len(args) == 0 {
		return "", "", nil
	}
	word, name, _ := strings.Cut(args[0], "/")
	if len(args) == 2 {
		name = args[1]
	}
	kind, ok := policy.ParseKind(word)
	if !ok {
		return "", "", fmt.Errorf("kind %q: must be networkacl (acl), securitygroup (sg) or attachment", word)
	}
	return kind, name, nil
}

func (p *Program) policyGet() *cobra.Command {
	var files configFlags
	form := output("table")
	cmd := &cobra.Command{
		Use: "get [KIND [NAME]]", Short: "list the policy documents in force, or show some", Args: cobra.MaximumNArgs(2),
		Long: "Get prints a table, or with -o yaml|json documents that apply takes again.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			kind, name, err := kindAndName(args)
			if err != nil {
				return err
			}
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			docs, err := c.Policies(cmd.Context(), string(kind), name)
			if err != nil {
				return err
			}
			if name != "" && len(docs) == 0 {
				return specapi.Errorf(specapi.NotFound, "%s/%s: no such document is in force", strings.ToLower(string(kind)), name)
			}
			items := make([]json.RawMessage, len(docs))
			for i, d := range docs {
				items[i] = json.RawMessage(d.Manifest)
			}
			list := map[string]any{"apiVersion": policy.APIVersion, "kind": policy.KindList, "items": items}
			return p.print(form, list, func(w io.Writer) {
				fmt.Fprintln(w, "KIND\tNAME\tSOURCE\tNUMBER")
				for _, d := range docs {
					fmt.Fprintf(w, "%s\t%s\t%s\t%d\n", d.Kind, d.Name, d.Source, d.Number)
				}
			})
		},
	}
	files.register(cmd, false)
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	return cmd
}

func (p *Program) policyDelete() *cobra.Command {
	var files configFlags
	cmd := &cobra.Command{
		Use: "delete KIND/NAME...", Short: "take policy documents out of force", Args: cobra.MinimumNArgs(1),
		Long: "Delete takes all of them or none; what is not there is no error.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, args []string) error {
			var req specapi.PolicyDeleteRequest
			for _, a := range args {
				kind, name, err := kindAndName([]string{a})
				if err != nil {
					return err
				}
				if name == "" {
					return fmt.Errorf("%s: give KIND/NAME", a)
				}
				req.Objects = append(req.Objects, specapi.PolicyName{Kind: string(kind), Name: name})
			}
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			out, err := c.DeletePolicy(cmd.Context(), req)
			if err != nil {
				return p.refused(strings.Join(args, " "), err)
			}
			p.showChange(out)
			return nil
		},
	}
	files.register(cmd, false)
	return cmd
}

func (p *Program) policyExplain() *cobra.Command {
	var files configFlags
	form := output("table")
	var req specapi.ExplainRequest
	cmd := &cobra.Command{
		Use: "explain --from END --to END[:PORT]", Short: "say what the rules do with the first packet of a flow, and why", Args: cobra.NoArgs,
		Long: endsHelp + "An endpoint must be READY, and rules do not look at the source's port.\n\nExit status 0 also when the packet is denied.\n" + exitHelp,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := files.connect(cmd)
			if err != nil {
				return err
			}
			defer c.Close()
			out, err := c.ExplainPolicy(cmd.Context(), req)
			if err != nil {
				return err
			}
			return p.print(form, out, func(w io.Writer) { showExplanation(w, out) })
		},
	}
	files.register(cmd, false)
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	cmd.Flags().StringVar(&req.From, "from", "", "source")
	cmd.Flags().StringVar(&req.To, "to", "", "destination")
	cmd.Flags().StringVar(&req.Protocol, "proto", "tcp", "protocol, by name or number")
	cmd.Flags().Uint16Var(&req.Port, "port", 0, "destination port")
	for _, f := range []string{"from", "to"} {
		_ = cmd.MarkFlagRequired(f) // fails only for a flag that does not exist
	}
	return cmd
}

func showExplanation(w io.Writer, x specapi.PolicyExplanation) {
	for _, point := range x.Points {
		for _, s := range point.Steps {
			rule := strings.TrimSpace(s.Policy + " " + s.Rule)
			if rule == "" {
				rule = "-"
			}
			fmt.Fprintf(w, "%s\t%s\t%d %s\t%s\t%s\n", point.Direction, point.Endpoint, s.Reason, s.Name, rule, s.Why)
		}
	}
	verdict := "denied"
	if x.Allowed {
		verdict = "allowed"
	}
	fmt.Fprintf(w, "%s -> %s: %s\n", x.From, x.To, verdict)
}
