SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3.11
CONFIG ?= configs/tiny-qwen3.yaml
BIN := .venv/bin
STAMP := .venv/stamp-run
DEV_STAMP := .venv/stamp-dev
# The stamps hold the hash of pyproject.toml: a set-up that fits needs no network.
HASH := $(shell sha256sum pyproject.toml | cut -d' ' -f1)
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run test lint demo-model bench-decode bench-tp8 bench-moe setup setup-dev emulator

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

run: setup emulator ## Serve the demo model, or CONFIG=configs/x.yaml
	@exec $(BIN)/dist-aclgraph serve $(CONFIG)

# Two processes: the emulator's settings hold for the life of one, and its own tests are strict.
test: setup-dev emulator lint ## Lint, then run all tests
	$(BIN)/python -m pytest tests/emulator
	$(BIN)/python -m pytest --ignore=tests/emulator

lint: setup-dev ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

DEMO ?= tiny_qwen3
demo-model: setup ## Train a demo model again, half an hour on one core; DEMO=tiny_deepseek
	$(BIN)/python models/make_$(DEMO).py

bench-decode: setup emulator ## Decode against transformers, and host time by stage
	$(BIN)/python -m dist_aclgraph.bench.decode

TP ?= 8
bench-tp8: setup emulator ## Graph modes on eight ranks by turns, or TP=2
	$(BIN)/python -m dist_aclgraph.bench.tp8 --tp $(TP)

bench-moe: setup emulator ## Experts on four ranks: graphs, drafts, overlap and exchanges by turns
	$(BIN)/python -m dist_aclgraph.bench.moe

emulator: setup ## Build the emulated NPU where there is no real one
	@ls /dev/davinci[0-9]* >/dev/null 2>&1 || $(BIN)/python -m dist_aclgraph.device.emulator

# torch first: torch-npu wants it there. The package itself comes last and needs no network.
setup: ## Make .venv with the pinned packages
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(HASH)" ]; then set -e; \
	  echo "Setting up .venv (once; later runs need no network) ..."; \
	  test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	  $(BIN)/python -m pip install -q "setuptools>=77" wheel torch==2.13.0; \
	  $(BIN)/python tools/requirements.py > .venv/requirements.txt; \
	  $(BIN)/python -m pip install -q -r .venv/requirements.txt; \
	  $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .; \
	  echo $(HASH) > $(STAMP); fi

setup-dev: setup
	@if [ "$$(cat $(DEV_STAMP) 2>/dev/null)" != "$(HASH)" ]; then set -e; \
	  $(BIN)/python tools/requirements.py dev > .venv/requirements-dev.txt; \
	  $(BIN)/python -m pip install -q -r .venv/requirements-dev.txt; \
	  echo $(HASH) > $(DEV_STAMP); fi
