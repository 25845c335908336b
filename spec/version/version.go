// Package version holds the version that all four programs print.
package version

// Version is set by the linker (see the Makefile); "dev" in a plain go build.
var Version = "dev"
