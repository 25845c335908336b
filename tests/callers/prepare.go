package main

import (
	"fmt"
	"os"
	"path/filepath"

	"mknet/tests/conformance/suite"
)

// folders are where the binaries lie, below the cache folder.
type folders struct {
	tools      string // trace, cnitool and the Go callers
	reference  string // plugins of containernetworking
	containerd string // containerd 2
	ours       string // mk-cni, mknetd
}

func locate(bin string) (folders, error) {
	cache, err := suite.CacheDir()
	if err != nil {
		return folders{}, err
	}
	f := folders{
		tools:      filepath.Join(cache, "callers"),
		reference:  filepath.Join(cache, "conformance"),
		containerd: filepath.Join(cache, "containerd2"),
		ours:       filepath.Join(cache, "conformance", "bin"),
	}
	if bin != "" {
		f.ours, err = filepath.Abs(bin)
	}
	return f, err
}

// containerdTags leaves out what the matrix does not use and what needs cgo.
const containerdTags = "no_btrfs no_devmapper no_zfs"

// prepare builds everything, outside of the private host. A caller that cannot be
// built is reported later as not run, with what the build said.
func prepare(plugin, bin string) error {
	root, err := suite.Root()
	if err != nil {
		return err
	}
	f, err := locate(bin)
	if err != nil {
		return err
	}
	here := filepath.Join(root, "tests", "callers")
	if err := suite.Build(root, f.tools, "./tests/callers/trace"); err != nil {
		return err
	}
	if plugin == "mk" && bin == "" {
		if err := suite.Build(root, f.ours, "./mk-cni", "./mknetd"); err != nil {
			return err
		}
	}
	if err := suite.Build(filepath.Join(here, "reference"), f.reference, "tool"); err != nil {
		return fmt.Errorf("the chained plugins: %w", err)
	}
	for _, b := range []struct {
		dir, out string
		args     []string
	}{
		{"programs", f.tools, []string{"./libcni", "./gocni", "./cri", "./adopt", "tool"}},
		{"containerd2", f.containerd, []string{"-tags", containerdTags, "tool"}},
	} {
		why := whyNot(b.out, b.dir)
		err := suite.Build(filepath.Join(here, b.dir), b.out, b.args...)
		if err == nil {
			err = os.RemoveAll(why)
		} else {
			err = os.WriteFile(why, []byte(err.Error()), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// whyNot is the file that holds the error of a build that did not work out.
func whyNot(out, name string) string { return filepath.Join(out, name+".not-built") }

// notBuilt returns why a build did not work out, or nothing.
func notBuilt(out, name string) string {
	raw, err := os.ReadFile(whyNot(out, name))
	if err != nil {
		return ""
	}
	return "not built: " + string(raw)
}
