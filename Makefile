# mknet. `make help` lists the targets; README.md says what each one shows.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
export CGO_ENABLED := 0
export PATH := $(PATH):/usr/sbin:/sbin:/usr/local/go/bin

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X mknet/spec/version.Version=$(VERSION)
GOBUILD := go build -trimpath -ldflags '$(LDFLAGS)'
FUZZTIME ?= 30s

# The packages whose tests need nothing but this machine; -p bounds how many
# private hosts run side by side, -timeout is per package.
TESTFLAGS ?= -p 3 -timeout 40m
# The long ones first, so that none is left to run alone at the end.
TESTS     := ./tests/e2e ./tests/conformance ./mknetd/internal/explain ./tests/crash ./tests/pods ./mknetd/internal/ipt ./mknetd/internal/datapath ./mk-cni/internal/plugin ./tests/pump ./tests/operate ./...

# make crash CHURN=10000 (or 1h) makes so many operations under random kills instead of
# walking the crash points; SEED repeats the choices of an earlier run.
CHURN ?=
SEED  ?=

.PHONY: help build build-crash setup bpf-tools generate demo test race lint fuzz crash callers conformance twokernel bench bench-pump bench-pods bench-policy clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup:
	@scripts/setup.sh

build: ## build the four programs into bin/
	@mkdir -p bin
	$(GOBUILD) -o bin/ ./mk-cni ./mknetd ./mk-agent
	$(GOBUILD) -o bin/mk-shim ./shim

bpf-tools:
	@scripts/setup.sh scripts/bpf-packages.txt

generate: bpf-tools ## compile the eBPF programs; their objects are committed
	go generate ./mknetd/internal/datapath

build-crash: ## the same with crash points, into bin/crashpoints/
	@mkdir -p bin/crashpoints
	$(GOBUILD) -tags crashpoints -o bin/crashpoints/ ./mk-cni ./mknetd ./mk-agent
	$(GOBUILD) -tags crashpoints -o bin/crashpoints/mk-shim ./shim

demo: setup build ## the main job on real parts, step by step, in a private host
	@mkdir -p bin/tools
	@go build -trimpath -o bin/tools/ github.com/containernetworking/cni/cnitool ./tests/demo
	@bin/tools/demo -bin bin -cnitool bin/tools/cnitool

# With MKNET_REQUIRE set a test that lacks something fails and does not skip.
test: setup bpf-tools build build-crash ## every test that needs no virtual machine
	MKNET_REQUIRE=all MKNET_PROGRAMS=$(CURDIR)/bin MKNET_CRASH_PROGRAMS=$(CURDIR)/bin/crashpoints go test $(TESTFLAGS) $(TESTS)

race: setup bpf-tools build build-crash ## the same under the race detector
	CGO_ENABLED=1 MKNET_REQUIRE=all MKNET_PROGRAMS=$(CURDIR)/bin MKNET_CRASH_PROGRAMS=$(CURDIR)/bin/crashpoints go test -race $(TESTFLAGS) $(TESTS)

bin/tools/golangci-lint: scripts/tools/go.mod
	@mkdir -p bin/tools
	go build -modfile=scripts/tools/go.mod -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

lint: setup bin/tools/golangci-lint ## formatting, vet, staticcheck, the import arrows
	bin/tools/golangci-lint fmt --diff
	bin/tools/golangci-lint run
	bash -n scripts/*.sh .ci/run

fuzz: setup ## every fuzz target for FUZZTIME each
	@scripts/fuzz.sh $(FUZZTIME)

crash: setup build build-crash ## kill mknetd, mk-cni and mk-shim at every visit of every crash point; CHURN=10000 or 1h: at random, so many operations or so long
ifeq ($(CHURN),)
	MKNET_CRASH_WALK=all MKNET_CRASH_PROGRAMS=$(CURDIR)/bin/crashpoints go test -v -count 1 -timeout 6h -run 'TestEveryCrashPoint$$' ./tests/crash
else
	MKNET_CHURN=$(CHURN) MKNET_CHURN_SEED=$(SEED) MKNET_PROGRAMS=$(CURDIR)/bin go test -v -count 1 -timeout 12h -run 'TestChurn$$' ./tests/crash
endif

callers: setup build ## every real CNI caller in front of mk-cni: a table of caller x verb
	@scripts/setup.sh tests/callers/packages.txt
	go run ./tests/callers -bin bin

conformance: setup build ## the 59 points of CNI 1.1.0, beside the reference ptp and bridge
	go run ./tests/conformance -compare ptp,bridge

twokernel: setup build ## two real kernels in QEMU, over real AF_VSOCK
	@scripts/setup.sh tests/twokernel/packages.txt
	go run ./tests/twokernel

bench: bench-pump bench-pods bench-policy ## every benchmark

bench-pump: setup build ## the packet pump against plain variants and its peers; BENCH_OUT=DIR writes pump.json
	@scripts/setup.sh tests/bench/packages.txt
	go run ./tests/bench pump

bench-pods: setup build ## two ordinary pods of a node against plain routing, ptp and bridge; BENCH_OUT=DIR writes pods.json
	go run ./tests/bench pods

bench-policy: setup build ## what policy costs a packet, a change and the memory, and beside iptables and nft; BENCH_OUT=DIR writes policy.json and trace.json
	@scripts/setup.sh tests/bench/packages.txt
	@go test -run '^$$' -bench '^Benchmark(Policy|Trace)$$' -benchtime 1x ./mknetd/internal/datapath | grep -v ' ns/op'
	go run ./tests/bench policy

clean: ## remove what was built
	rm -rf bin
