package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// kernelCommandLine makes a guest boot in seconds under TCG: a quiet console, no
// mitigations, and full preemption, which keeps vsock's worker from waiting for a
// busy process. The TSC is not declared reliable: on a busy machine the guest may
// calibrate it wrongly, and then the clock watchdog must be able to drop it.
const kernelCommandLine = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr edd=off no_timer_check audit=0 " +
	"preempt=full nowatchdog random.trust_cpu=on"

// Config is one virtual machine.
type Config struct {
	Name        string // of its files in Dir
	Dir         string // for sockets and the console's log
	Kernel      Kernel
	Initramfs   string
	CommandLine string // added to the kernel's
	MemoryMiB   int
	VsockSocket string // vhost-user back end; empty: no vsock device
}

// Machine is a running guest. Its methods are for one goroutine, but for Kill,
// which any may call at any time.
type Machine struct {
	Config
	Release  string        // of the kernel, as it says itself
	BootTime time.Duration // from QEMU's start to the first answer
	cmd      *exec.Cmd
	done     chan struct{} // closed once QEMU has ended
	control  *control
}

// Boot starts a guest and returns once it answers. When it fails, the console's
// end is in the error. The guest dies with this process.
func Boot(ctx context.Context, c Config) (*Machine, error) {
	begin := time.Now()
	socket := c.path("control.sock")
	if err := os.RemoveAll(socket); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	console, err := os.OpenFile(c.path("console.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer console.Close()
	m := &Machine{Config: c, cmd: exec.Command("qemu-system-x86_64", c.arguments(socket)...), done: make(chan struct{})}
	m.cmd.Stdout, m.cmd.Stderr = console, console
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.cmd.Start(); err != nil {
		return nil, fmt.Errorf("guest %s: %w", c.Name, err)
	}
	go func() {
		_ = m.cmd.Wait() // its end is what counts
		close(m.done)
	}()
	if err := m.greet(ctx, l); err != nil {
		m.Kill()
		return nil, fmt.Errorf("guest %s did not boot: %w\n%s", c.Name, err, m.ConsoleTail())
	}
	m.BootTime = time.Since(begin)
	return m, nil
}

// greet waits for QEMU's connection and the guest's first words.
func (m *Machine) greet(ctx context.Context, l *net.UnixListener) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-m.done:
			cancel(errors.New("QEMU has ended"))
		case <-ctx.Done():
		}
	}()
	defer context.AfterFunc(ctx, func() { _ = l.SetDeadline(time.Unix(1, 0)) })()
	conn, err := l.AcceptUnix()
	if err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	m.control = newControl(conn)
	m.Release, err = m.control.greeting(ctx)
	return err
}

func (c *Config) path(suffix string) string { return c.Dir + "/" + c.Name + "-" + suffix }

func (c *Config) arguments(control string) []string {
	args := []string{
		"-accel", "tcg,thread=single", "-cpu", "max", "-smp", "1", "-m", fmt.Sprint(c.MemoryMiB),
		"-M", "pc,usb=off,vmport=off,memory-backend=memory",
		// Shared memory is what a vhost-user back end works on.
		"-object", fmt.Sprintf("memory-backend-memfd,id=memory,size=%dM,share=on", c.MemoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio",
		"-chardev", "socket,id=control,path=" + control, "-serial", "chardev:control",
		"-kernel", c.Kernel.Image, "-initrd", c.Initramfs,
		"-append", kernelCommandLine + " " + c.CommandLine,
	}
	if c.VsockSocket != "" {
		args = append(args, "-chardev", "socket,id=vsock,path="+c.VsockSocket, "-device", "vhost-user-vsock-pci,chardev=vsock")
	}
	return args
}

// Kill ends the guest as a power failure would, and waits for QEMU.
func (m *Machine) Kill() {
	_ = m.cmd.Process.Kill()
	<-m.done
	if m.control != nil {
		m.control.conn.Close()
	}
}

// ConsoleTail is the end of what the kernel and process 1 wrote.
func (m *Machine) ConsoleTail() string {
	b, err := os.ReadFile(m.path("console.log"))
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4096):])
}
