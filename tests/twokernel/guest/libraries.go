package guest

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
)

// libraryPath is where Debian keeps what ld.so finds without a cache.
var libraryPath = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib"}

// libraries returns the shared libraries and the interpreter that the ELF files
// need, directly or not. Files that are no ELF files need none.
func libraries(files ...string) ([]string, error) {
	var found []string
	seen := map[string]bool{}
	for queue := files; len(queue) > 0; queue = queue[1:] {
		needed, interpreter, err := elfNeeds(queue[0])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", queue[0], err)
		}
		if interpreter != "" && !seen[interpreter] {
			seen[interpreter] = true
			found = append(found, interpreter)
		}
		for _, name := range needed {
			if seen[name] {
				continue
			}
			seen[name] = true
			path, err := findLibrary(name)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", queue[0], err)
			}
			found = append(found, path)
			queue = append(queue, path)
		}
	}
	return found, nil
}

func elfNeeds(path string) (needed []string, interpreter string, err error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	if s := f.Section(".interp"); s != nil {
		b, err := s.Data()
		if err != nil {
			return nil, "", err
		}
		interpreter = string(b[:max(0, len(b)-1)]) // ends with a zero
	}
	if f.Section(".dynamic") == nil {
		return nil, interpreter, nil
	}
	needed, err = f.ImportedLibraries()
	return needed, interpreter, err
}

func findLibrary(name string) (string, error) {
	for _, dir := range libraryPath {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("library %s is in none of %v", name, libraryPath)
}
