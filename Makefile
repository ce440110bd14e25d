# llmbox: everything is built from Go modules; `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# No C compiler is needed, and no path of this machine ends up in a binary. The race
# detector alone wants cgo: see test-race.
export CGO_ENABLED := 0
export GOFLAGS := -trimpath -buildvcs=false
export GOWORK := off

# v1.2.3, or 0.0.0-dev-COMMIT where nothing is tagged; outside a clone, a development build.
TAGGED := $(shell git describe --tags --match 'v*' --dirty 2>/dev/null)
COMMIT := $(shell git describe --always --dirty --exclude '*' 2>/dev/null)
VERSION ?= $(or $(TAGGED),0.0.0-dev$(addprefix -,$(COMMIT)))
STAMP := $(if $(COMMIT),true,false)

# Each folder with a go.mod of its own that holds code of the project.
MODULES := . $(patsubst %/go.mod,%,$(wildcard test/*/go.mod)) test/lab/gpu-sim test/lab/proxy-standin test/rules/promtool tools/crds tools/man tools/release
# What a lab runs; the helm CLI is only compared with.
LAB_PROGRAMS := kube-apiserver kube-controller-manager kube-scheduler kine kwok

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' Makefile

# The child that asks NVML is the one part that needs a C compiler. `build` takes it
# along where there is gcc; without it the binary says "helper absent".
NVML_CHILD = embed/nvml/$(shell go env GOARCH)/llmbox-nvml
NVML_CGO := CGO_ENABLED=1 CGO_CFLAGS='-O2 -g -Wno-deprecated-declarations'
HAVE_GCC := $(shell command -v gcc)

.PHONY: nvml
nvml: ## Build the NVML child into embed/nvml (needs gcc; starts on glibc 2.17 and newer)
	$(NVML_CGO) go build -ldflags '-s -w' -o $(NVML_CHILD) ./cmd/llmbox-nvml

.PHONY: build
build: $(if $(HAVE_GCC),nvml) ## Build bin/llmbox and bin/llmbox-lab
	go build -buildvcs=$(STAMP) -ldflags '-s -w -X main.version=$(VERSION)' -o bin/llmbox ./cmd/llmbox
	cd test/lab && go build -ldflags '-s -w' -o ../../bin/llmbox-lab ./cmd/llmbox-lab

.PHONY: lab
lab: build ## Compile the lab's Kubernetes into bin/lab (10 to 20 minutes once, then cached)
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab $(LAB_PROGRAMS)

.PHONY: lab-helm
lab-helm: lab ## Compile the helm CLI too, with which tests and bench-install compare
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab helm

# What runs on the node-size lab: Kubernetes' own node programs, and stand-ins of the
# project. The stand-ins are compiled from test/lab, seconds each; those with a go.mod of
# their own share the versions, and so the compiled packages, of what they talk to.
LAB_NODE_PROGRAMS := $(filter-out kwok,$(LAB_PROGRAMS)) kubelet kube-proxy kube-router-netpol coredns local-path-provisioner
LAB_STANDINS := pause-standin hub-standin http-standin vllm-sim kube-state-metrics-standin

.PHONY: lab-node
lab-node: build ## Compile what a node-size lab runs into bin/lab (Debian packages to start it: test/lab/README.md)
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab $(LAB_NODE_PROGRAMS)
	cd test/lab && go build -ldflags '-s -w' -o ../../bin/lab/ $(LAB_STANDINS:%=./%)
	cd test/lab/gpu-sim && go build -ldflags '-s -w' -o ../../../bin/lab/gpu-sim .

.PHONY: lab-machine
lab-machine: lab-node ## Compile what a machine is installed on needs, too: the stand-in for k3s
	cd test/lab && go build -ldflags '-s -w' -o ../../bin/lab/k3s-standin ./k3s-standin

.PHONY: lab-node-gateway
lab-node-gateway: lab-node ## Compile Envoy Gateway and the stand-in for Envoy, too
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab envoy-gateway egctl
	cd test/lab/proxy-standin && go build -ldflags '-s -w' -o ../../../bin/lab/proxy-standin .

# The GPU operator, its operands, and a node that looks as if it had a GPU: what asks
# NVML is compiled with cgo, and NVML itself is a stand-in written in C.
LAB_GPU_PROGRAMS := gpu-operator nvidia-validator nfd-master nfd-worker nfd-gc nvidia-device-plugin gpu-feature-discovery config-manager nvidia-container-runtime
LAB_NVML_CC = gcc -O1 -s -Wall -Wextra -Werror -Wno-deprecated-declarations -DNVML_NO_UNVERSIONED_FUNC_DEFS=1 -I "$$(go list -m -f '{{.Dir}}' github.com/NVIDIA/go-nvml)/gen/nvml"

.PHONY: lab-node-gpu
lab-node-gpu: lab-node ## Compile the GPU operator, its operands and a simulated GPU, too (needs gcc)
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab $(LAB_GPU_PROGRAMS)
	cd test/lab/gpu-sim && go build -ldflags '-s -w' -o ../../../bin/lab/dcgm-exporter-standin ./dcgm-exporter-standin
	$(LAB_NVML_CC) -shared -fPIC -o bin/lab/nvml-standin.so test/lab/nvml-standin/nvml_standin.c
	$(LAB_NVML_CC) -o bin/lab/nvidia-smi-standin test/lab/nvml-standin/nvidia_smi_standin.c -ldl

.PHONY: lab-egctl
lab-egctl: build ## Compile Envoy Gateway's translator, with which test/rendered looks at what Envoy is told
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab egctl

LAB_OPERATORS := prometheus-operator prometheus-config-reloader prometheus alertmanager node-exporter kyverno kyverno-init \
	keda keda-adapter keda-admission-webhooks vault-on-core external-secrets helm-controller helm4

.PHONY: lab-node-full
lab-node-full: lab-node-gateway $(if $(HAVE_GCC),lab-node-gpu) ## Compile every operator that can be compiled
	bin/llmbox-lab build --modules test/lab/modules --out bin/lab $(LAB_OPERATORS)
	cd test/lab && go build -ldflags '-s -w' -o ../../bin/lab/ ./helm-job-standin

.PHONY: e2e
e2e: lab-machine ## Install on a real node, one token, uninstall, no trace (root); with the gateway after lab-node-gateway
	cd test/lab && LLMBOX_E2E=1 go test -count=1 -v -timeout 30m $(TEST) ./e2e

.PHONY: e2e-full
e2e-full: lab-node-full lab-machine ## Install everything on a real node and let it work (root; an hour and a half, and an hour of compiling once)
	cd test/lab && LLMBOX_E2E=full go test -count=1 -v -timeout 150m $(TEST) ./e2e

.PHONY: e2e-systemd
e2e-systemd: lab-machine ## Have a real systemd in a container run what llmbox installs (root; systemd-container, debootstrap)
	cd test/lab && LLMBOX_E2E=full go test -count=1 -v -timeout 40m -run '^TestSystemd$$' ./e2e

.PHONY: e2e-bundle
e2e-bundle: lab-machine lab-node-gateway ## A box from a bundle on a machine without a cable, and one that joins by it (root; ten minutes)
	cd test/lab && LLMBOX_E2E=full go test -count=1 -v -timeout 40m -run '^(TestBundle|TestJoinFromABundle)$$' ./e2e

.PHONY: rehearse
rehearse: lab ## Run the whole install against a real API server (ARGS='--gpu h100 --gpus 8')
	bin/llmbox rehearse $(ARGS)

.PHONY: test
test: lab-helm ## Run every test of every module; needs Chromium for the report's (TEST='-run Name' narrows)
	@failed=''; for module in $(MODULES); do \
	  echo "== go test ./... in $$module"; \
	  kube=; if [ "$$module" = tools/crds ]; then kube='$(CURDIR)/bin/lab'; fi; \
	  ( cd "$$module" && LLMBOX_KUBE_BIN="$$kube" go test -timeout 40m $(TEST) ./... ) || failed+=" $$module"; \
	done; \
	$(if $(HAVE_GCC),echo "== the NVML child"; $(NVML_CGO) go test $(TEST) ./cmd/llmbox-nvml || failed+=" cmd/llmbox-nvml"; ) \
	if [ -n "$$failed" ]; then echo "failed in:$$failed" >&2; exit 1; fi

.PHONY: test-race
test-race: lab-helm ## Run the product's and the lab's tests under the race detector (needs a C compiler)
	CGO_ENABLED=1 go test -race -timeout 60m $(TEST) ./...
	cd test/lab && CGO_ENABLED=1 go test -race -timeout 60m $(TEST) ./...

.PHONY: lint-fast
lint-fast: ## gofmt and go vet in every module
	@unformatted=$$(gofmt -l $(filter-out .,$(wildcard cmd embed internal test tools))); \
	if [ -n "$$unformatted" ]; then echo "gofmt -w these:"; echo "$$unformatted"; exit 1; fi
	@for module in $(MODULES); do echo "== go vet ./... in $$module"; ( cd "$$module" && go vet ./... ); done
	$(if $(HAVE_GCC),$(NVML_CGO) go vet ./cmd/llmbox-nvml)

.PHONY: lint
lint: lint-fast bin/golangci-lint ## lint-fast, then golangci-lint with .golangci.yml (the linter compiles for minutes once)
	@for module in $(MODULES); do echo "== golangci-lint in $$module"; \
	  ( cd "$$module" && '$(CURDIR)/bin/golangci-lint' run --config '$(CURDIR)/.golangci.yml' ./... ); done

bin/golangci-lint: tools/lint/go.mod tools/lint/go.sum
	cd tools/lint && go build -ldflags '-s -w' -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint

.PHONY: crds
crds: ## Regenerate embed/crds from upstream's Go API types (list: tools/crds/groups.go)
	cd tools/crds && go run . -root ../..

.PHONY: crds-check
crds-check: ## Regenerating changes nothing, same as upstream ships, accepted by a real API server
	cd tools/crds && LLMBOX_KUBE_BIN='$(if $(wildcard bin/lab/kube-apiserver),$(CURDIR)/bin/lab)' go test -count=1 ./...

.PHONY: docs
docs: ## Rewrite the pages that are generated: docs/{config,components,pod-security,footprint}.md
	go test -count=1 -run '^TestReference$$' ./internal/config -update
	go test -count=1 -run '^TestComponentsPage$$' ./internal/component -update
	go test -count=1 -run '^Test(PodSecurity|Footprint)Page$$' ./test/rendered -update

.PHONY: generated-check
generated-check: ## Every generated page and CRD is what its source says (docs, embed/crds, the manual)
	go test -count=1 -run '^TestReference$$' ./internal/config
	go test -count=1 -run '^TestComponentsPage$$' ./internal/component
	go test -count=1 -run '^TestDocs$$' ./internal/preflight ./internal/doctor
	go test -count=1 ./internal/repair
	go test -count=1 -run '^Test(PodSecurity|Footprint)Page$$' ./test/rendered
	cd tools/crds && go test -count=1 -run Regenerat ./...
	cd tools/man && go test -count=1 ./...

.PHONY: release
release: ## Build dist/: binaries, packages, bills of materials, licences, checksums (docs/release.md; gcc and gcc-aarch64-linux-gnu)
	scripts/release.sh

.PHONY: release-check
release-check: ## Build the release of HEAD twice, in different directories, and compare every byte
	scripts/release-check.sh

.PHONY: release-test
release-test: ## Build a release signed with a key of the moment, verify it and install it (root, rpm, qemu-user-static, debootstrap)
	scripts/release-test.sh $(TEST)

.PHONY: roots
roots: ## Make the clean root file systems of test-roots and newcomer in the user's cache (root, debootstrap; minutes, once)
	scripts/debian-roots.sh

.PHONY: test-roots
test-roots: ## Run install.sh, and brev.sh under systemd, in clean roots of Debian 12 and 13 and two others (root; systemd-container)
	roots=$$(scripts/debian-roots.sh) && LLMBOX_DEBIAN_ROOTS=$$roots go test -count=1 -run '^Test(InCleanRoots|BrevUnderSystemd)$$' $(TEST) ./test/scripts

.PHONY: newcomer
newcomer: ## Clone and type README's blocks, line for line, on a clean Debian with Go, git and make (root; compiles for a quarter of an hour)
	roots=$$(scripts/debian-roots.sh) && LLMBOX_NEWCOMER_ROOT=$$roots/newcomer go test -count=1 -v -timeout 120m -run '^TestNewcomer$$' $(TEST) ./test/docs

.PHONY: release-size
release-size: ## Which modules the binary's bytes are of
	go build -buildvcs=false -o bin/llmbox-symbols ./cmd/llmbox
	cd tools/release && go run . size '$(CURDIR)/bin/llmbox-symbols'
	rm -f bin/llmbox-symbols

.PHONY: vuln
vuln: ## Look what is linked up in Go's vulnerability database (VULNDB=file:///DIR: a copy, such as data/osv of module golang.org/x/vulndb)
	go mod verify
	cd tools/vuln && go build -o ../../bin/govulncheck golang.org/x/vuln/cmd/govulncheck
	go build -buildvcs=false -o bin/llmbox-symbols ./cmd/llmbox
	bin/govulncheck -mode binary $(VULNDB:%=-db %) bin/llmbox-symbols; code=$$?; rm -f bin/llmbox-symbols; exit $$code

.PHONY: cover
cover: ## Statement coverage of each package by its own tests
	@go test -timeout 40m -cover $(or $(PACKAGES),./internal/... ./embed/...) | awk '/coverage: [0-9]/ { name = $$1 == "ok" ? $$2 : $$1; sub(/^.*llmbox\//, "", name); sub(/^.*coverage: /, ""); printf "%-28s %s\n", name, $$1; next } /^(FAIL|---)/ { print; bad = 1 } END { exit bad }'

.PHONY: bench-plan
bench-plan: ## Plan tables of 10, 100 and 1,000 components; the time grows with the needs
	go test -run '^$$' -bench '^BenchmarkOrder' -benchmem ./internal/component

.PHONY: bench-install
bench-install: lab-helm ## Install by llmbox and by the helm CLI on one lab, and compare both with the bound
	go run ./test/benchinstall $(ARGS)

.PHONY: bench-download
bench-download: ## Download one file by llmbox, curl and aria2c (Debian packages), verified and synced (ARGS='-mib 4096')
	go run ./test/benchdownload $(ARGS)

.PHONY: bench-interrupted
bench-interrupted: ## Kill each kind of download and go on; at most 1 % of the bytes come twice (a quiet machine)
	LLMBOX_MEASURE=1 go test -count=1 -v -run '^TestInterrupted$$' ./internal/machine

.PHONY: bench-bundle
bench-bundle: ## Make a bundle by llmbox and an archive of the same data by tar | zstd -T0, both synced (ARGS='-mib 8192')
	go run ./test/benchbundle $(ARGS)

.PHONY: bench-first-token
bench-first-token: lab-machine lab-node-gateway lab-helm ## From an empty machine to a token over a capped link, by llmbox and part after part, beside the bound (root; an hour; ARGS='-caps 10')
	go run ./test/benchfirsttoken $(ARGS)

.PHONY: proof-crash
proof-crash: lab ## Kill installs with SIGKILL and run them again; appends to docs/proofs/crash.jsonl
	go run ./test/proofcrash $(ARGS)

.PHONY: proof-kill
proof-kill: lab-machine lab-node-gateway ## Kill installs on an empty machine, and the machine, and run them again (root; over an hour); appends to docs/proofs/kill.jsonl
	go run ./test/proofmachine kill $(ARGS)

.PHONY: proof-trace
proof-trace: lab-machine lab-node-gateway ## Uninstall after installs and uninstalls that were cut off, and compare the machine (root); appends to docs/proofs/trace.jsonl
	go run ./test/proofmachine trace $(ARGS)

.PHONY: proof-doctor
proof-doctor: lab-machine lab-node-full ## Break a whole box in some fifty ways and ask doctor each time (root, gcc; over an hour); appends to docs/proofs/doctor.jsonl
	go run ./test/proofdoctor $(ARGS)

.PHONY: fuzz
fuzz: ## Feed every reader of foreign bytes with nonsense (FUZZTIME=60s for each)
	@go list ./... | while read -r package; do \
	  dir=$$(go list -f '{{.Dir}}' "$$package"); \
	  grep -ohE '^func Fuzz[A-Za-z]+' "$$dir"/*_test.go 2>/dev/null | sed 's/^func //' | while read -r target; do \
	    echo "== $$target in $$package"; \
	    go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(or $(FUZZTIME),60s) -fuzzminimizetime 10x "$$package" </dev/null; \
	  done || exit 1; \
	done

.PHONY: clean
clean: ## Remove bin (the compiled Kubernetes stays in the user's cache)
	rm -rf bin
