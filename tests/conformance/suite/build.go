package suite

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// CacheDir is where the tests keep what they build and download:
// $XDG_CACHE_HOME/mknet or ~/.cache/mknet.
func CacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w", err)
	}
	return filepath.Join(dir, "mknet"), nil
}

// Root is the project's folder, found from the working directory upwards.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if raw, err := os.ReadFile(filepath.Join(dir, "go.mod")); err == nil && strings.HasPrefix(string(raw), "module mknet\n") {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", fmt.Errorf("no go.mod of module mknet above the working directory")
		}
		dir = up
	}
}

// Build runs go build for packages of the module in dir, into the folder out.
// It needs the machine's network the first time, so it is called outside of the
// private host.
func Build(dir, out string, packages ...string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	cmd := exec.Command("go", append([]string{"build", "-trimpath", "-o", out + "/"}, packages...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s in %s: %w:\n%s", strings.Join(packages, " "), dir, err, text)
	}
	return nil
}
