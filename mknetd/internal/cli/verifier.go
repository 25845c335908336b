package cli

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

// VerifierCost is what loading one eBPF program costs the verifier of this kernel.
type VerifierCost struct {
	Program      string  `json:"program"`
	Instructions uint32  `json:"instructions"` // that it followed
	Limit        uint32  `json:"limit"`
	Percent      float64 `json:"percent"`
}

// maxVerifierPercent is what a program may cost: later kernels count more.
const maxVerifierPercent = 5

func (p *Program) verifierCommand() *cobra.Command {
	form := output("table")
	cmd := &cobra.Command{
		Use: "verifier-check", Short: "load the eBPF programs once and say what they cost this kernel's verifier", Args: cobra.NoArgs,
		Long: fmt.Sprintf("Verifier-check loads each program and lets go of it; the node's own stay as they are. A program\nmay cost %d %% of the limit.\n\nExit status: 0 all do; 1 one costs more, or is refused; 2 wrong arguments.", maxVerifierPercent),
		RunE: func(*cobra.Command, []string) error {
			costs, err := p.Verifier()
			if err != nil {
				return &exitError{status: ExitDiffers, err: err}
			}
			over := 0
			for _, c := range costs {
				if c.Percent > maxVerifierPercent {
					over++
				}
			}
			err = p.print(form, costs, func(w io.Writer) {
				fmt.Fprintln(w, "PROGRAM\tINSTRUCTIONS\tLIMIT\tPERCENT")
				for _, c := range costs {
					fmt.Fprintf(w, "%s\t%d\t%d\t%.2f\n", c.Program, c.Instructions, c.Limit, c.Percent)
				}
			})
			if err == nil && over > 0 {
				err = &exitError{status: ExitDiffers, err: fmt.Errorf("%d programs cost more than %d %% of the verifier's limit", over, maxVerifierPercent)}
			}
			return err
		},
	}
	cmd.Flags().VarP(&form, "output", "o", "form of the output")
	return cmd
}
