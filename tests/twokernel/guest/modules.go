package guest

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// moduleOrder returns the files of the named modules and of all that they need,
// each after what it needs. Modules that are built into the kernel are left out.
func moduleOrder(dir string, names []string) ([]string, error) {
	files, err := moduleFiles(dir)
	if err != nil {
		return nil, err
	}
	builtin, err := os.ReadFile(dir + "/modules.builtin")
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(builtin)) {
		seen[moduleName(strings.TrimSpace(line))] = true
	}
	var order []string
	var add func(name string) error
	add = func(name string) error {
		if seen[name] {
			return nil
		}
		seen[name] = true
		file, ok := files[name]
		if !ok {
			return fmt.Errorf("the kernel has no module %s", name)
		}
		needs, err := moduleNeeds(file)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, n := range needs {
			if err := add(n); err != nil {
				return err
			}
		}
		order = append(order, file)
		return nil
	}
	for _, n := range names {
		if err := add(n); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// moduleFiles finds every module below dir by its name.
func moduleFiles(dir string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(dir+"/kernel", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".ko") {
			files[moduleName(path)] = path
		}
		return err
	})
	return files, err
}

// moduleName is the kernel's name for a module file: "-" is "_" to it.
func moduleName(path string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
}

// moduleNeeds reads a module's dependencies where depmod does: "depends=a,b" in
// the section .modinfo, strings that end with a zero.
func moduleNeeds(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("%s has no .modinfo", path)
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		if list, ok := strings.CutPrefix(string(entry), "depends="); ok && list != "" {
			names := strings.Split(list, ",")
			for i := range names {
				names[i] = moduleName(names[i])
			}
			return names, nil
		}
	}
	return nil, nil
}
