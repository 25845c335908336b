// Package step prints what a caller did, one line a step, for the driver in
// tests/callers: name, tab, "ok" or "failed", tab, what came back.
package step

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
)

var failed bool

// OK records a step that must succeed and reports whether it did.
func OK(name string, err error) bool {
	print(name, err == nil, err)
	return err == nil
}

// Must is OK that ends the program when the step failed.
func Must(name string, err error) {
	if !OK(name, err) {
		os.Exit(1)
	}
}

// Refused records a step that must fail.
func Refused(name string, err error) { print(name, err != nil, err) }

// Equal records a comparison.
func Equal(name string, got, want any) {
	var err error
	if fmt.Sprint(got) != fmt.Sprint(want) {
		err = fmt.Errorf("got %v, want %v", got, want)
	}
	OK(name, err)
}

// Hook runs the driver's command while the attachment stands; its output follows.
func Hook(command []string) {
	if len(command) == 0 {
		return
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	OK("hook", cmd.Run())
}

// End exits with 1 when any step went wrong.
func End() {
	if failed {
		os.Exit(1)
	}
	os.Exit(0)
}

func print(name string, ok bool, err error) {
	word, detail := "ok", ""
	if !ok {
		word, failed = "failed", true
	}
	if err != nil {
		detail = strings.Join(strings.Fields(err.Error()), " ")
	}
	fmt.Printf("%s\t%s\t%s\n", name, word, detail)
}
