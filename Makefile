SHELL := /bin/bash
.DEFAULT_GOAL := help
# The first Python of this list for which torch-npu has a wheel and which can make virtual environments.
PYTHONS := python3.11 python3.12 python3.13 python3
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(shell for p in $(PYTHONS); do $$p -c '$(FITS)' 2>/dev/null && echo $$p; done))
CONFIG ?= configs/tiny-qwen3.yaml
# The line of torch_npu (dist_aclgraph/device/versions.py). If you choose another line, also set another VENV.
NPU ?= 2.13
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp-run
DEV_STAMP := $(VENV)/stamp-dev
# The stamps contain the hash of pyproject.toml, setup.py and the line. If the hash is unchanged, make needs no
# network.
HASH := $(shell (cat pyproject.toml setup.py; echo $(NPU)) | sha256sum | cut -d' ' -f1)
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some container images set this variable. Without stored bytecode each new process compiles torch and Ray again,
# which doubles the time of their import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run quick test test-more test-paused test-all test-clients test-cluster test-upstream test-versions test-vllm-ascend lint demo-model bench-arrivals bench-decode bench-tp8 bench-moe bench-context bench-load \
	bench-hybrid bench-kv bench-messages bench-overlap bench-overload bench-rehearsal bench-scale bench-serve bench-simulate bench-start bench-step bench-structured bench-vllm-ascend chaos perf-gate soak setup setup-bench setup-clients \
	setup-dev setup-vllm emulator emulator-wheel python

help: ## Show the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

run: setup emulator ## Serve the demo model, or CONFIG=configs/x.yaml
	@exec $(BIN)/dist-aclgraph serve $(CONFIG)

# The emulator's tests run separately: a process cannot change the emulator's settings, and these tests are
# strict. JOBS processes each run one test file after the other, the longest files first (tests/conftest.py).
# Benches run alone.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest
SPREAD = $(PYTEST) -n $(JOBS) --dist loadgroup --no-loadscope-reorder
OTHERS = $(SPREAD) --ignore=tests/emulator --ignore=tests/clients
quick: JOBS = 2
quick: setup-dev ## Run the tests that need neither device nor Ray, in about a minute on two cores
	$(SPREAD) -m "not slow" tests/unit tests/text

test: setup-dev emulator ## Lint, and run the tests that each change must pass
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	  $(SPREAD) -m "not slow" tests/emulator && wait $$lint
	$(OTHERS) -m "not slow and not bench and not namespaces"
	@echo "Not among these: make test-more; and make test-cluster (as root), hosts of network namespaces."

test-more: setup-dev emulator ## Run the tests that make test leaves out: more models, layouts, chips and faults
	$(SPREAD) -m "slow and not rare" tests/emulator
	$(OTHERS) -m "slow and not rare and not bench and not namespaces"
	@echo "Not among these: hosts of network namespaces, for which there is make test-cluster (as root)."

# The mean time between two pauses of a process, and the length of most pauses, in seconds; see tools/pauses.cpp.
PAUSES ?= 0.5,0.4
PAUSED = PAUSES=$(PAUSES) LD_PRELOAD=$(abspath $(VENV))/pauses.so
test-paused: setup-dev emulator ## Run make test while single threads pause, to find tests that depend on the order of threads
	$(CXX) -std=c++17 -O2 -shared -fPIC -o $(VENV)/pauses.so tools/pauses.cpp -ldl
	$(PAUSED) $(MAKE) --no-print-directory test

# The number of frames that strangers send to the ports of a deployment while it streams. 100,000 frames took
# 40 s on two busy cores, on which the 2,000 frames of make test took 21 s.
JUNK ?= 100000
test-cluster: setup-dev emulator ## Test hosts in network namespaces (root), Ray's own utility, JUNK=100000 frames of junk
	DIST_ACLGRAPH_JUNK=$(JUNK) $(PYTEST) -v tests/cluster

# nginx, HAProxy, Caddy, promtool and chromium must be installed on the system. If a program is missing, its
# tests are skipped. Some clients need a torch; they get the build of .venv, because a torch for CUDA takes
# 6 GB.
CLIENTS := .venv-clients
CLIENT_PIP = $(CLIENTS)/bin/python -m pip install -q --no-compile
CLIENTS_STAMP := $(CLIENTS)/stamp
test-clients: setup-dev emulator setup-clients setup-vllm ## Test a service with other projects' clients, benchmarks and proxies
	$(PYTEST) -v tests/clients

setup-clients: setup
	@if [ "$$(cat $(CLIENTS_STAMP) 2>/dev/null)" != "$(HASH)" ]; then set -e; \
	  echo "Setting up $(CLIENTS) (once) ..."; \
	  test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS); \
	  $(BIN)/python tools/requirements.py --only clients > $(CLIENTS)/requirements.txt; \
	  $(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
	    > $(CLIENTS)/constraints.txt; \
	  $(CLIENT_PIP) --no-deps --retries 1 --timeout 15 --extra-index-url $(CPU_WHEELS) \
	    -r $(CLIENTS)/constraints.txt; \
	  $(CLIENT_PIP) -c $(CLIENTS)/constraints.txt -r $(CLIENTS)/requirements.txt; \
	  $(CLIENT_PIP) --no-deps $$($(BIN)/python tools/requirements.py --only clients-alone); \
	  echo $(HASH) > $(CLIENTS_STAMP); fi

LINES ?=
test-versions: setup-dev ## Run tests of the emulator, a rank and a probe with each torch_npu, or LINES="2.10 2.12"
	$(BIN)/python -m tools.test_versions $(LINES)

CHECKOUT ?=
FILES ?=
test-upstream: setup-dev emulator ## Run torch_npu's tests of CHECKOUT=dir (Ascend/pytorch), or FILES="npu/test_copy.py"
	@test -d "$(CHECKOUT)/test" || { echo "CHECKOUT=$(CHECKOUT) is no work tree of Ascend/pytorch: get it with" \
	  "git clone https://gitcode.com/Ascend/pytorch.git" >&2; exit 1; }
	$(BIN)/python -m tools.test_upstream $(CHECKOUT) $(FILES)

# vLLM runs from the folder of its sources, which need no compiler when they are used without CUDA. Its environment
# has the packages of $(VENV), and its own packages before them.
VLLM := .venv-vllm
VLLM_VERSION := 0.27.1
HAS_VLLM_ASCEND = @test -d "$(CHECKOUT)/vllm_ascend" || { echo "CHECKOUT=$(CHECKOUT) is no work tree of vllm-ascend:" \
  "get it with git clone https://github.com/vllm-project/vllm-ascend.git" >&2; exit 1; }
test-vllm-ascend: setup emulator setup-vllm ## Compare tokens of vllm-ascend (CHECKOUT=dir) on the emulated NPU with ours
	$(HAS_VLLM_ASCEND)
	$(BIN)/python -m tools.test_vllm_ascend $(CHECKOUT) $(VLLM)

KERNELS ?= timed
MODE ?= FULL_DECODE_ONLY
bench-vllm-ascend: setup-bench emulator setup-vllm ## Measure streams over HTTP, beside vllm-ascend (CHECKOUT=dir); KERNELS=skip
	$(HAS_VLLM_ASCEND)
	$(BIN)/python -m tools.bench_vllm_ascend $(CHECKOUT) $(VLLM) --kernels $(KERNELS) --mode $(MODE)

VLLM_PINS := emulator/for_vllm_ascend/requirements.txt
VLLM_PIP = $(VLLM)/bin/python -m pip
setup-vllm: setup
	@if ! cmp -s $(VLLM_PINS) $(VLLM)/stamp; then set -e; \
	  echo "Setting up $(VLLM) (once) ..."; \
	  test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM); \
	  $(BIN)/python -c 'import site; print("import site; site.addsitedir(" + repr(site.getsitepackages()[0]) + ")")' \
	    > "$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_main.pth"; \
	  $(VLLM_PIP) install -q --no-compile --no-deps -r $(VLLM_PINS); \
	  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) $(VLLM_PIP) download -q --no-deps \
	    --no-binary vllm --no-build-isolation -d $(VLLM)/download vllm==$(VLLM_VERSION); \
	  mkdir -p $(VLLM)/vllm; \
	  tar xzf $(VLLM)/download/vllm-$(VLLM_VERSION).tar.gz --strip-components=1 -C $(VLLM)/vllm; \
	  cp $(VLLM_PINS) $(VLLM)/stamp; fi

test-all: setup-dev emulator lint ## Lint, then run all tests, including benches and laws with many examples
	$(SPREAD) --hypothesis-profile=full tests/emulator
	$(SPREAD) --hypothesis-profile=full --ignore=tests/emulator --ignore=tests/clients -m "not bench and not namespaces"
	$(PYTEST) tests/cluster -m namespaces
	$(PYTEST) -m bench tests/bench

lint: setup-dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

DEMO ?= tiny_qwen3
demo-model: setup-bench ## Train a demo model again, half an hour on one core; DEMO=NAME for models/make_NAME.py
	$(BIN)/python models/make_$(DEMO).py

bench-decode: setup-bench emulator ## Compare decoding with transformers, and measure the host time by stage
	$(BIN)/python -m benchmarks.decode

TP ?= 8
bench-tp8: setup-bench emulator ## Compare graph modes by turns on eight ranks, or TP=2
	$(BIN)/python -m benchmarks.tp8 --tp $(TP)

bench-moe: setup-bench emulator ## Compare graphs, drafts, overlap and exchanges by turns, with experts on four ranks
	$(BIN)/python -m benchmarks.moe

bench-context: setup-bench emulator ## Measure contexts over eight ranks: caches in shards, decoding, prompts
	$(BIN)/python -m benchmarks.context

bench-start: setup-bench emulator ## Compare the start of several groups at the same time with the start of one group
	$(BIN)/python -m benchmarks.start

bench-simulate: setup-bench emulator ## Compare a load on an emulated NPU with the simulation of the same load
	$(BIN)/python -m benchmarks.simulate

bench-arrivals: setup-bench emulator ## Show the time to the first token, with and without late decisions
	$(BIN)/python -m benchmarks.arrivals

bench-overlap: setup-bench emulator ## Show the causes of a modelled device's waits, with one and two steps in flight
	$(BIN)/python -m benchmarks.overlap

bench-load: setup-bench emulator ## Compare loading 4 GiB of weights on four ranks with reading them once
	$(BIN)/python -m benchmarks.load

SEED ?= 1
FAULTS ?= 12
SHAPE ?= replicas
NODES ?= 0
chaos: setup-dev emulator ## Inject faults into a service: SEED=1 FAULTS=12 SHAPE=replicas; NODES=3 (root) plays hosts
	$(BIN)/python -m tools.chaos --seed $(SEED) --faults $(FAULTS) --shape $(SHAPE) --nodes $(NODES)

MINUTES ?= 120
soak: setup-dev emulator ## Run load and faults for MINUTES=120, and find what grows; writes docs/operate/soak.md
	$(BIN)/python -m tools.chaos.soak --minutes $(MINUTES) --seed $(SEED) --shape $(SHAPE)

bench-overload: setup-dev emulator ## Measure readers during ten times too many requests, stalled readers, huge bodies
	$(BIN)/python -m tools.chaos.overload

bench-step: setup-bench emulator ## Measure the host's work in a decode step, part by part
	$(BIN)/python -m benchmarks.step

bench-kv: setup-bench emulator ## Measure prompts whose KV is in files, and steps beside copies of KV blocks
	$(BIN)/python -m benchmarks.kv

bench-hybrid: setup-bench emulator ## Compare a hybrid, a sparse and a dense model of equal width
	$(BIN)/python -m benchmarks.hybrid

bench-rehearsal: setup-bench emulator ## Run large deployments of configs/ at full shape, without weights and NPUs
	$(BIN)/python -m benchmarks.rehearsal

perf-gate: setup-bench emulator ## Compare launches, updates, uploads and modelled time of steps with known numbers
	$(BIN)/python -m benchmarks.perf_gate

bench-structured: setup-bench emulator ## Compare decode steps with and without constrained requests
	$(BIN)/python -m benchmarks.structured

bench-messages: setup-bench ## Measure how long a plan to all workers of a node and their results take
	$(BIN)/python -m benchmarks.messages

bench-scale: setup-bench ## Measure the engine's work in a step of groups with 8 to 1,024 workers
	$(BIN)/python -m benchmarks.scale

bench-serve: setup-bench ## Measure a token's cost from engine to client's socket, compared with a bare uvicorn
	$(BIN)/python -m benchmarks.serve

EMULATED := ! ls /dev/davinci[0-9]* >/dev/null 2>&1
emulator: setup ## Build the emulated NPU if there is no real one
	@if $(EMULATED); then $(BIN)/python -m dist_aclgraph.device.emulator; fi

emulator-wheel: setup ## Build dist/npu_emulator-*.whl, the emulated NPU without this package
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist ./emulator

python: ## Show which Python is used; PYTHON=... selects another
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 with venv is here (Debian, Ubuntu:" \
	  "apt-get install python3 python3-venv)" >&2; exit 1; }
	@echo $(PYTHON)

# The emulator needs only torch and torch-npu, so it is built while another pip installs the other packages. If
# this build fails, the target emulator builds again and shows the error. The last pip adds the packages that
# torch needs. Modules are compiled when they are first imported, not all 30,000. The package itself needs no
# network.
# Some registries give a torch for CUDA; it is replaced by the build for CPUs. If no registry has that
# build, the torch for CUDA stays, if this torch_npu can be loaded with it. Some lines of torch-npu require a
# torch+cpu, so pip installs torch-npu without its requirements, and these separately.
PIP = $(BIN)/python -m pip install -q --no-compile
CPU_WHEELS := https://download.pytorch.org/whl/cpu
setup: ## Make .venv with the pinned packages; NPU=2.12 VENV=.venv-2.12 selects another torch_npu
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(HASH)" ]; then set -e; \
	  test -x $(BIN)/python || $(MAKE) -s python >/dev/null; \
	  echo "Setting up $(VENV) (once; later runs need no network) ..."; \
	  test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python tools/requirements.py npu-$(NPU) > $(VENV)/requirements.txt; \
	  grep -v '^torch' $(VENV)/requirements.txt > $(VENV)/others.txt; \
	  $(PIP) --no-warn-conflicts "setuptools>=77" wheel -r $(VENV)/others.txt & others=$$!; \
	  $(PIP) --no-deps $$(grep '^torch' $(VENV)/requirements.txt); \
	  $(BIN)/python -c 'import sys; from dist_aclgraph.device.emulator import cuda_version; \
	    sys.exit(bool(cuda_version()))' || $(PIP) --no-deps --retries 1 --timeout 15 \
	    --force-reinstall --index-url $(CPU_WHEELS) $$(grep '^torch==' $(VENV)/requirements.txt) || \
	    $(BIN)/python -c 'from dist_aclgraph.device.emulator import check_torch; check_torch()'; \
	  if $(EMULATED); then \
	    MAKEFLAGS= make -C emulator -j$$(nproc) PYTHON=$(CURDIR)/$(BIN)/python \
	      > $(VENV)/emulator.log 2>&1 & fi; \
	  wait $$others; \
	  $(PIP) $$(grep '^torch==' $(VENV)/requirements.txt); \
	  $(PIP) --no-deps --no-build-isolation -e .; \
	  wait; echo $(HASH) > $(STAMP); fi

setup-bench: setup
	@$(BIN)/python -c 'import matplotlib.figure, transformers' 2>/dev/null || { \
	  $(BIN)/python tools/requirements.py bench > $(VENV)/requirements-bench.txt; \
	  $(PIP) -r $(VENV)/requirements-bench.txt; }

setup-dev: setup
	@if [ "$$(cat $(DEV_STAMP) 2>/dev/null)" != "$(HASH)" ]; then set -e; \
	  $(BIN)/python tools/requirements.py dev > $(VENV)/requirements-dev.txt; \
	  $(PIP) -r $(VENV)/requirements-dev.txt; \
	  echo $(HASH) > $(DEV_STAMP); fi
