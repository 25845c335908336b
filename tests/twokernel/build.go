package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"mknet/tests/twokernel/guest"
)

// built is what prepare leaves in its folder.
type built struct {
	bin            string // the four programs, cnitool and inguest
	kernel         guest.Kernel
	primary, child string // initramfs
}

func builtIn(dir string) built {
	modules, _ := filepath.Glob(dir + "/kernel/lib/modules/*")
	k := guest.Kernel{Image: dir + "/kernel/vmlinux"}
	if len(modules) == 1 {
		k.Modules = modules[0]
	}
	return built{bin: dir + "/bin", kernel: k, primary: dir + "/primary.img", child: dir + "/child.img"}
}

// build makes programs, kernel and images in dir. It runs in the module's root or
// below.
func build(ctx context.Context, dir string) error {
	b := builtIn(dir)
	if err := buildPrograms(ctx, b.bin); err != nil {
		return err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return err
	}
	kernel, err := guest.FetchKernel(ctx, home+"/.cache/mknet/twokernel")
	if err != nil {
		return err
	}
	if err := os.Symlink(filepath.Dir(kernel.Image), dir+"/kernel"); err != nil {
		return err
	}
	programs := func(names ...string) (paths []string) {
		for _, n := range names {
			paths = append(paths, b.bin+"/"+n)
		}
		return paths
	}
	err = guest.WriteImage(ctx, b.primary, kernel, guest.Spec{
		Init:     b.bin + "/inguest",
		Modules:  append(append(append([]string{}, guest.VsockModules...), guest.LoopbackModules...), guest.PrimaryModules...),
		Tools:    []string{"ip", "ping", "conntrack"},
		Programs: programs("mknetd", "mk-cni", "mk-shim", "mk-agent", "cnitool"),
		XTables:  true,
	})
	if err != nil {
		return err
	}
	return guest.WriteImage(ctx, b.child, kernel, guest.Spec{
		Init: b.bin + "/inguest", Modules: guest.VsockModules, Tools: []string{"ping"}, Programs: programs("mk-agent"),
	})
}

// buildPrograms builds everything that runs inside, static.
func buildPrograms(ctx context.Context, bin string) error {
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	for _, p := range []struct{ name, pkg string }{
		{"mknetd", "mknet/mknetd"},
		{"mk-cni", "mknet/mk-cni"},
		{"mk-shim", "mknet/shim"},
		{"mk-agent", "mknet/mk-agent"},
		{"inguest", "mknet/tests/twokernel/inguest"},
		{"cnitool", "github.com/containernetworking/cni/cnitool"},
	} {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin+"/"+p.name, p.pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", p.pkg, err, out)
		}
	}
	return nil
}
