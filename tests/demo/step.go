package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// show is the running demo: it prints each step with the command that makes or
// proves it, runs that command as an operator's shell would, and counts.
type show struct {
	out            io.Writer
	passed, failed int
	background     []*exec.Cmd
	logDir         string
}

// stepLimit bounds one command; the slowest (10 MB) takes well under a second.
const stepLimit = 60 * time.Second

// chapter prints a heading.
func (s *show) chapter(title string) { fmt.Fprintf(s.out, "\n== %s\n", title) }

// expect is what a step must show: an exit status and words in the output.
type expect struct {
	fails bool     // the command must exit non-zero
	has   []string // each must be in the output
	lacks []string // none may be in the output
	quiet bool     // print no output
}

// step runs one command line with bash and prints it, its output and whether it
// held. The output (stdout and stderr) is returned.
func (s *show) step(what, line string, want expect) string {
	fmt.Fprintf(s.out, "\n-- %s\n   $ %s\n", what, line)
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", line)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	text := strings.TrimRight(out.String(), "\n")
	if !want.quiet && text != "" {
		fmt.Fprintln(s.out, "     "+strings.ReplaceAll(text, "\n", "\n     "))
	}
	var faults []string
	switch {
	case err != nil && !want.fails:
		faults = append(faults, fmt.Sprintf("must succeed: %v", err))
	case err == nil && want.fails:
		faults = append(faults, "must fail, but succeeded")
	}
	for _, w := range want.has {
		if !strings.Contains(text, w) {
			faults = append(faults, fmt.Sprintf("output lacks %q", w))
		}
	}
	for _, w := range want.lacks {
		if strings.Contains(text, w) {
			faults = append(faults, fmt.Sprintf("output has %q", w))
		}
	}
	s.verdict(faults)
	return text
}

// quiet runs a command line that is no step.
func (s *show) quiet(line string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, "bash", "-c", line).Output()
	return string(out), err
}

func (s *show) verdict(faults []string) {
	if len(faults) == 0 {
		s.passed++
		fmt.Fprintln(s.out, "   ok")
		return
	}
	s.failed++
	fmt.Fprintln(s.out, "   FAILED: "+strings.Join(faults, "; "))
}

// start runs a program in the background until the demo ends; its output goes to
// a log file. It dies with the demo, however that ends.
func (s *show) start(name string, argv ...string) (*exec.Cmd, error) {
	fmt.Fprintf(s.out, "   $ %s &\n", strings.Join(argv, " "))
	log, err := os.OpenFile(s.log(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s.background = append(s.background, cmd)
	return cmd, nil
}

func (s *show) log(name string) string { return s.logDir + "/" + name + ".log" }

// stop ends one background program in order and waits for it.
func (s *show) stop(cmd *exec.Cmd) error {
	if cmd == nil || cmd.ProcessState != nil {
		return nil
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(stepLimit):
		_ = cmd.Process.Kill()
		<-done
		return fmt.Errorf("%s did not stop within %s", cmd.Path, stepLimit)
	}
}

// stopAll ends what still runs, last started first.
func (s *show) stopAll() {
	for i := len(s.background) - 1; i >= 0; i-- {
		_ = s.stop(s.background[i])
	}
}

// until polls f and gives up with its last error.
func until(limit time.Duration, f func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}
