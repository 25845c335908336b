// Command trace stands in a plugin folder under a plugin's name, notes what the
// caller really sent, and runs the real plugin with the same environment and
// standard input. What it needs to know is in the file .trace beside it.
//
// One line of JSON a call: the CNI variables, the cniVersion on standard input,
// the exit status, and the answer where there was an error.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// settings is the file .trace.
type settings struct {
	Real string `json:"real"` // folder of the real plugins
	Log  string `json:"log"`  // file that the lines are appended to
}

// call is one line.
type call struct {
	By          string `json:"by,omitempty"` // TRACE_BY, where the sender is not the caller itself
	Plugin      string `json:"plugin"`
	Command     string `json:"command"`
	ContainerID string `json:"containerID"`
	Netns       string `json:"netns"`
	IfName      string `json:"ifname"`
	Args        string `json:"args"`
	CNIVersion  string `json:"cniVersion"`
	PrevResult  bool   `json:"prevResult"`
	Exit        int    `json:"exit"`
	Answer      string `json:"answer,omitempty"`
}

func main() {
	status, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "trace:", err)
		os.Exit(1)
	}
	os.Exit(status)
}

func run() (int, error) {
	name := filepath.Base(os.Args[0])
	raw, err := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), ".trace"))
	if err != nil {
		return 0, err
	}
	var s settings
	if err := json.Unmarshal(raw, &s); err != nil {
		return 0, fmt.Errorf(".trace: %w", err)
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		return 0, err
	}
	var conf struct {
		CNIVersion string          `json:"cniVersion"`
		PrevResult json.RawMessage `json:"prevResult"`
	}
	_ = json.Unmarshal(stdin, &conf) // the plugin's to judge
	var out bytes.Buffer
	cmd := exec.Command(filepath.Join(s.Real, name), os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a caller kills what it started
	status := 0
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		status = exit.ExitCode()
	} else if err != nil {
		return 0, err
	}
	line := call{
		By: os.Getenv("TRACE_BY"), Plugin: name, Command: os.Getenv("CNI_COMMAND"), ContainerID: os.Getenv("CNI_CONTAINERID"), Netns: os.Getenv("CNI_NETNS"),
		IfName: os.Getenv("CNI_IFNAME"), Args: os.Getenv("CNI_ARGS"), CNIVersion: conf.CNIVersion, PrevResult: conf.PrevResult != nil, Exit: status,
	}
	if status != 0 {
		line.Answer = out.String()
	}
	if err := note(s.Log, line); err != nil {
		return 0, err
	}
	_, err = os.Stdout.Write(out.Bytes())
	return status, err
}

// note appends one line in one write, so that calls side by side do not mix.
func note(path string, c call) error {
	line, err := json.Marshal(c)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}
