package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// kernelPackage depends on the current cloud kernel.
const kernelPackage = "linux-image-cloud-amd64"

// Kernel is an unpacked kernel package.
type Kernel struct {
	Image   string // vmlinux, to boot by PVH
	Modules string // the folder with kernel/
}

// FetchKernel returns the kernel in the cache folder, and fetches Debian's
// current one when there is none. It installs nothing.
func FetchKernel(ctx context.Context, cache string) (Kernel, error) {
	if k, err := findKernel(cache); err == nil {
		return k, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return Kernel{}, err
	}
	dir, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return Kernel{}, err
	}
	defer os.RemoveAll(dir)
	if err := downloadKernel(ctx, dir); err != nil {
		return Kernel{}, fmt.Errorf("fetch %s: %w", kernelPackage, err)
	}
	images, err := filepath.Glob(dir + "/root/boot/vmlinuz-*")
	if err != nil || len(images) != 1 {
		return Kernel{}, fmt.Errorf("%s holds %d kernels, want one", kernelPackage, len(images))
	}
	packed, err := os.ReadFile(images[0])
	if err != nil {
		return Kernel{}, err
	}
	image, err := unpackImage(packed)
	if err != nil {
		return Kernel{}, fmt.Errorf("%s: %w", filepath.Base(images[0]), err)
	}
	if err := os.WriteFile(dir+"/root/vmlinux", image, 0o644); err != nil {
		return Kernel{}, err
	}
	// The rename is last: what is there under its name is whole.
	if err := os.Rename(dir+"/root", cache+"/kernel"); err != nil && !errors.Is(err, fs.ErrExist) {
		return Kernel{}, err
	}
	return findKernel(cache)
}

func findKernel(cache string) (Kernel, error) {
	k := Kernel{Image: cache + "/kernel/vmlinux"}
	if _, err := os.Stat(k.Image); err != nil {
		return Kernel{}, err
	}
	modules, err := filepath.Glob(cache + "/kernel/lib/modules/*")
	if err != nil || len(modules) != 1 {
		return Kernel{}, fmt.Errorf("%s/kernel/lib/modules has %d versions, want one", cache, len(modules))
	}
	k.Modules = modules[0]
	return k, nil
}

// downloadKernel unpacks the package that kernelPackage depends on into dir/root.
func downloadKernel(ctx context.Context, dir string) error {
	name, err := currentKernel(ctx)
	if err != nil {
		// A fresh machine has no package lists.
		if err := command(ctx, dir, "apt-get", "update", "-qq"); err != nil {
			return err
		}
		if name, err = currentKernel(ctx); err != nil {
			return err
		}
	}
	// APT::Sandbox::User: apt's own user may not be able to write into dir.
	if err := command(ctx, dir, "apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", name); err != nil {
		return err
	}
	debs, err := filepath.Glob(dir + "/*.deb")
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download left %d packages, want one", len(debs))
	}
	return command(ctx, dir, "dpkg", "-x", debs[0], "root")
}

var kernelDependency = regexp.MustCompile(`(?m)^\s*Depends: (linux-image-\S+)$`)

func currentKernel(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "depends", kernelPackage).Output()
	if err != nil {
		return "", fmt.Errorf("apt-cache depends %s: %w", kernelPackage, err)
	}
	m := kernelDependency.FindSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("apt-cache depends %s names no kernel", kernelPackage)
	}
	return string(m[1]), nil
}

func command(ctx context.Context, dir string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", argv, err, out)
	}
	return nil
}
