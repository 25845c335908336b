package main

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mknet/tests/conformance/suite"
)

// options say which plugins are tried; the command and the tests share them.
type options struct {
	plugin  string
	config  string
	compare string
}

func registerFlags(fs *flag.FlagSet) *options {
	o := &options{}
	fs.StringVar(&o.plugin, "plugin", "", "the plugin's binary; default: this project's, built")
	fs.StringVar(&o.config, "config", "", "its configuration (one plugin, or a list whose first plugin counts)")
	fs.StringVar(&o.compare, "compare", "", "also try these, comma-separated: veth (this project's, in that mode), ptp, bridge")
	return o
}

// Where the binaries are; the private host sees the same folders.
func toolsDir() (string, error) {
	cache, err := suite.CacheDir()
	return filepath.Join(cache, "conformance"), err
}

// prepare builds what the run needs. It runs outside of the private host, which
// has no way to a module proxy.
func (o *options) prepare() error {
	root, err := suite.Root()
	if err != nil {
		return err
	}
	tools, err := toolsDir()
	if err != nil {
		return err
	}
	if err := suite.Build(root, tools, "./tests/conformance/double"); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(tools, "double-ipam")); err != nil {
		return err
	}
	if err := os.Link(filepath.Join(tools, "double"), filepath.Join(tools, "double-ipam")); err != nil {
		return err
	}
	if o.plugin == "" || slices.Contains(strings.Split(o.compare, ","), "veth") {
		if err := suite.Build(root, filepath.Join(tools, "bin"), "./mk-cni", "./mknetd"); err != nil {
			return err
		}
	} else if o.config == "" && isOurs(o.plugin) && !hasDaemon(o.plugin) {
		if err := suite.Build(root, filepath.Join(tools, "bin"), "./mknetd"); err != nil {
			return err
		}
	}
	if name := filepath.Base(o.plugin); o.compare != "" || name == "ptp" || name == "bridge" {
		return suite.Build(filepath.Join(root, "tests", "callers", "reference"), tools, "tool")
	}
	return nil
}

// isOurs tells by the two names that this project's plugin is installed under.
func isOurs(plugin string) bool {
	name := filepath.Base(plugin)
	return name == "mk-cni" || name == "multikernel"
}

// hasDaemon reports whether a mknetd of the same release lies beside the plugin;
// one that is installed as the README says does not.
func hasDaemon(plugin string) bool {
	_, err := os.Stat(filepath.Join(filepath.Dir(plugin), "mknetd"))
	return err == nil
}

// drivers returns the plugin under test first.
func (o *options) drivers() ([]suite.Driver, error) {
	tools, err := toolsDir()
	if err != nil {
		return nil, err
	}
	suite.SetTools(tools)
	first, err := o.driver(tools)
	if err != nil {
		return nil, err
	}
	all := []suite.Driver{first}
	for name := range strings.SplitSeq(o.compare, ",") {
		if name == "" {
			continue
		}
		if name == "veth" {
			all = append(all, pods(tools))
			continue
		}
		d, err := suite.NewReference(name, filepath.Join(tools, name))
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// pods drives this project's own build in veth mode.
func pods(tools string) suite.Driver {
	return suite.NewMkPods(filepath.Join(tools, "bin", "mk-cni"), filepath.Join(tools, "bin", "mknetd"))
}

// driver chooses by the binary's name; -config makes any plugin known enough.
func (o *options) driver(tools string) (suite.Driver, error) {
	if o.plugin != "" { // it runs in another folder
		path, err := filepath.Abs(o.plugin)
		if err != nil {
			return nil, err
		}
		o.plugin = path
	}
	if o.config != "" {
		conf, err := suite.LoadConf(o.config)
		if err != nil {
			return nil, err
		}
		return suite.NewGeneric(o.plugin, conf), nil
	}
	switch name := filepath.Base(o.plugin); {
	case o.plugin == "":
		return suite.NewMkCNI(filepath.Join(tools, "bin", "mk-cni"), filepath.Join(tools, "bin", "mknetd")), nil
	case isOurs(o.plugin):
		daemon := filepath.Join(filepath.Dir(o.plugin), "mknetd")
		if !hasDaemon(o.plugin) {
			daemon = filepath.Join(tools, "bin", "mknetd")
		}
		return suite.NewMkCNI(o.plugin, daemon), nil
	case strings.HasPrefix(name, "double"):
		return suite.NewDouble(o.plugin), nil
	default:
		return suite.NewReference(name, o.plugin)
	}
}
