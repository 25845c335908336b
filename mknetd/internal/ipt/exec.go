package ipt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mknet/mknetd/internal/netns"
	"mknet/spec/crash"
)

var tableCommitted = crash.New("ipt.table-committed")

// execTimeout bounds one run of iptables, the wait for the lock not counted. A
// legacy restore rewrites the whole table: 1.5 s at 4,000 endpoints (measured).
const execTimeout = 30 * time.Second

// CommandError is a run of iptables that ended with an error. The table is then
// as it was before: a restore commits all or nothing.
type CommandError struct {
	Command string // program and arguments
	Line    string // the line of the restore that iptables names, "" when it names none
	Status  int    // exit status, -1 when it did not exit by itself
	Stderr  string // the first lines of what it said

	legacy bool
}

func (e *CommandError) Error() string {
	msg := fmt.Sprintf("%s: exit status %d", e.Command, e.Status)
	if e.Stderr != "" {
		msg += ": " + e.Stderr
	}
	if e.Line != "" {
		msg += ": " + strconv.Quote(e.Line)
	}
	return msg
}

// resourceProblem is RESOURCE_PROBLEM of xtables.h.
const resourceProblem = 4

// Is makes a held lock match ErrBusy. iptables-nft, which takes no lock, has that
// status for other reasons.
func (e *CommandError) Is(target error) bool {
	return target == ErrBusy && e.legacy && e.Status == resourceProblem
}

// tools are the three programs of one flavour.
type tools struct {
	flavour       string
	iptables      string
	restore, save string
}

// run starts one program and returns its standard output, on error too. It ends
// the program when ctx or the limit does, and with it the kernel does when mknetd is
// killed: a commit that waits for a lock must not come after the undo of the next
// mknetd. What is killed half-way has committed all or nothing.
func run(ctx context.Context, limit time.Duration, stdin, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second // for its pipes; a machine under load needs some of it
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	netns.Pinned(func() { err = cmd.Run() })
	if err == nil {
		return stdout.String(), nil
	}
	command := strings.Join(cmd.Args, " ")
	if cause := context.Cause(ctx); cause != nil {
		return stdout.String(), fmt.Errorf("%s: %w", command, cause)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return stdout.String(), fmt.Errorf("%s: %w", command, err)
	}
	return stdout.String(), &CommandError{
		Command: command, Status: exit.ExitCode(),
		Stderr: oneLine(stderr.String()), Line: namedLine(stderr.String(), stdin),
	}
}

func (f *Firewall) run(ctx context.Context, stdin, name string, args ...string) (string, error) {
	out, err := run(ctx, f.wait+execTimeout, stdin, name, args...)
	var c *CommandError
	if errors.As(err, &c) {
		c.legacy = f.flavour == Legacy
		if errors.Is(err, ErrBusy) {
			err = fmt.Errorf("%w: %w", ErrBusy, err)
		}
	}
	return out, err
}

// restore commits lines to one table, all or nothing. What iptables-restore cannot
// read, foreign rules with a newline that are to be deleted, goes before by itself.
func (f *Firewall) restore(ctx context.Context, table string, lines []string) error {
	var readable []string
	for _, line := range lines {
		if !strings.ContainsAny(line, "\r\n") {
			readable = append(readable, line)
			continue
		}
		args := append([]string{"-w", f.waitSeconds(), "-t", table}, split(line)...)
		if _, err := f.run(ctx, "", f.tools.iptables, args...); err != nil {
			return err
		}
	}
	_, err := f.commit(ctx, table, readable)
	if err == nil {
		tableCommitted.At(table)
	}
	return err
}

// join is restore together with whoever changes the same table at the same time.
func (f *Firewall) join(ctx context.Context, table string, lines []string) error {
	err := f.group(table).do(ctx, lines)
	if err == nil {
		tableCommitted.At(table)
	}
	return err
}

func (f *Firewall) group(table string) *group {
	f.groupsMu.Lock()
	defer f.groupsMu.Unlock()
	g := f.groups[table]
	if g == nil {
		if f.groups == nil {
			f.groups = map[string]*group{}
		}
		g = &group{commit: func(ctx context.Context, lines []string) error {
			_, err := f.commit(ctx, table, lines)
			return err
		}}
		f.groups[table] = g
	}
	return g
}

// commit is restore that also returns what was printed, on error too.
func (f *Firewall) commit(ctx context.Context, table string, lines []string, flags ...string) (string, error) {
	text := "*" + table + "\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
	args := append([]string{"--noflush", "-w", f.waitSeconds()}, flags...)
	return f.run(ctx, text, f.tools.restore, args...)
}

// read returns what a table holds: the named chains only, where the flavour can
// read one chain at the cost of one chain, else all of it. A chain that cannot be read
// is an IncompatibleError, other chains of its table do not matter then.
func (f *Firewall) read(ctx context.Context, table string, chains ...string) (v *view, err error) {
	err = untilCompatible(ctx, func() (err error) {
		v, err = f.readOnce(ctx, table, chains)
		return err
	})
	return v, err
}

func (f *Firewall) readOnce(ctx context.Context, table string, chains []string) (*view, error) {
	v := newView(table)
	if f.flavour == Legacy || len(chains) == 0 {
		v.full = true
		out, err := f.run(ctx, "", f.tools.save, "-t", table)
		if err != nil {
			return nil, err
		}
		if err := whole(out, f.concerns); err != nil {
			return nil, err
		}
		return v, v.parse(out)
	}
	left := slices.Compact(slices.Sorted(slices.Values(chains)))
	for attempt := 1; len(left) > 0; {
		// A restore takes -S as well: many chains for one run, up to the first
		// that is not there.
		var lines []string
		for _, name := range left {
			lines = append(lines, "-S "+name)
		}
		out, err := f.commit(ctx, table, lines)
		if err := v.parse(out); err != nil {
			return nil, err
		}
		left = slices.DeleteFunc(left, v.has)
		if len(left) == 0 {
			break
		}
		if err != nil && !decided(err) {
			return nil, fmt.Errorf("read chain %s: %w", left[0], err)
		}
		// What -S says of a missing chain differs from version to version, and of one
		// that it cannot print too. The kernel knows which it is.
		there, lookErr := nftHasChain(table, left[0])
		switch {
		case lookErr != nil:
			return nil, fmt.Errorf("read chain %s: %w", left[0], lookErr)
		case !there:
			left = left[1:]
		case refusedToRead(err):
			return nil, fmt.Errorf("read chain %s: %w", left[0], &IncompatibleError{table})
		case attempt < readAttempts: // made since -S looked
			attempt++
		case err == nil:
			return nil, fmt.Errorf("read chain %s: it exists and %s does not print it", left[0], f.tools.restore)
		default:
			return nil, fmt.Errorf("read chain %s, which exists: %w", left[0], err)
		}
	}
	return v, nil
}

func (f *Firewall) waitSeconds() string {
	return strconv.Itoa(int((f.wait + time.Second - 1) / time.Second))
}

// oneLine bounds and joins what a program said, for an error of one line. A warning
// that the other flavour has tables would crowd out the rest: iptables-nft-restore
// repeats it for every chain.
func oneLine(s string) string {
	var parts []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "Try `") && !strings.HasPrefix(line, "# Warning: iptables-legacy tables present") {
			parts = append(parts, line)
		}
	}
	s = strings.Join(parts, "; ")
	if len(s) > 400 {
		s = s[:400] + "..."
	}
	return s
}

var lineNumber = regexp.MustCompile(`line:? (\d+)`)

// namedLine finds the input line that iptables-restore complains about. It is
// for the reader of an error only; nothing branches on it.
func namedLine(stderr, stdin string) string {
	m := lineNumber.FindStringSubmatch(stderr)
	if m == nil {
		return ""
	}
	n, err := strconv.Atoi(m[1])
	lines := strings.Split(stdin, "\n")
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	return lines[n-1]
}
