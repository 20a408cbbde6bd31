# Everything is installed into .venv, by pinned lists; nothing else on the machine is touched.
# .venv is made again when it is deleted, and brought up to date when a list changes.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
FRAMEWORKS := .venv-frameworks
BIN := $(VENV)/bin
MODELS := .models

# Arguments for the demo and for pytest: make demo ARGS="--turns 3", make test-fast ARGS="-k lease"
ARGS ?=

.PHONY: help
help: ## this list
	@echo "kvshuttle: moves an LLM's KV cache both ways between prefill and decode engines"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 28

# ---------------------------------------------------------------------------------- set-up

$(BIN)/python:
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "kvshuttle needs Python 3.11 with venv; set PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@echo "Setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: requirements/dev.txt pyproject.toml scripts/install.py | $(BIN)/python
	@$(BIN)/python scripts/install.py requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	  --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.cpu: requirements/cpu.txt $(VENV)/.dev
	@$(BIN)/python scripts/install.py requirements/cpu.txt
	@touch $@

# The agent frameworks of examples/, apart from vLLM.
$(FRAMEWORKS)/.installed: requirements/frameworks.txt pyproject.toml scripts/install.py
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python scripts/install.py requirements/frameworks.txt
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	  --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: venv venv-cpu frameworks model
venv: $(VENV)/.dev ## .venv for all but the engines
venv-cpu: $(VENV)/.cpu ## .venv with vLLM and NIXL for machines without a GPU
frameworks: $(FRAMEWORKS)/.installed ## .venv-frameworks for examples/: three agent frameworks

$(MODELS)/%/kvshuttle-model.json: scripts/make_model.py $(VENV)/.cpu
	@echo "Preparing the model $*"
	@$(BIN)/python scripts/make_model.py $* --out $(MODELS)/$*
	@touch $@

model: $(MODELS)/smollm2/kvshuttle-model.json $(MODELS)/tiny/kvshuttle-model.json ## the models that are served

# ------------------------------------------------------------------------------------- use

.PHONY: demo
demo: $(MODELS)/smollm2/kvshuttle-model.json ## a real conversation on real engines, turn by turn
	@$(BIN)/python -m kvshuttle.demo --model $(MODELS)/smollm2 $(ARGS)

# ----------------------------------------------------------------------------------- tests

.PHONY: test test-fast test-long lint dashboards reference proto sim sim-exhaustive soak mutants bench-controlplane bench-gateway bench-idle bench-planner bench-retention bench-ttft clean
test: ## lint and all tests, those on real engines too
	@$(MAKE) --no-print-directory -j2 model frameworks
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python scripts/run_tests.py $(ARGS)

test-fast: lint ## lint and the tests that need no engine and little time
	@$(BIN)/python scripts/run_tests.py --fast $(ARGS)

test-long: model $(MODELS)/tiny-experts/kvshuttle-model.json ## engines of two ranks, and of experts, which make test leaves out
	@$(BIN)/python -m pytest tests/e2e -m long $(ARGS)

lint: $(VENV)/.dev ## style, types, layers, the API's rules, the stubs
	@VENV=$(VENV) scripts/lint.sh

dashboards: $(VENV)/.dev ## writes deploy/grafana from scripts/dashboard_panels.py
	@$(BIN)/python -m scripts.dashboards

reference: $(VENV)/.dev ## writes docs/reference from the protos and the settings
	@$(BIN)/python -m scripts.reference

proto: $(VENV)/.dev ## generates the Python stubs from proto/
	@VENV=$(VENV) scripts/proto.sh
	@$(BIN)/python -m scripts.reference

# LANGUAGES="go java" for some of them. What the tools are: docs/sdk.md
LANGUAGES ?=
.PHONY: sdk sdk-test
sdk: $(VENV)/.dev ## generates and compiles the clients of TypeScript, Go, Java from proto/
	@$(BIN)/python scripts/sdk.py $(LANGUAGES) || [ $$? -eq 3 ]

sdk-test: $(VENV)/.dev ## runs each of them against a real control plane
	@$(BIN)/python -m pytest tests/integration/sdk $(ARGS)

# make sim SCHEDULES=1000000; make sim LONG=60 runs for so many minutes; ARGS="--seed 7 --trace"
SCHEDULES ?= 10000
LONG ?= 0
sim: $(VENV)/.dev ## the lease protocol on virtual time: seeded faults, invariants checked
	@$(BIN)/python -m tests.simulation --schedules $(SCHEDULES) --minutes $(LONG) $(ARGS)

sim-exhaustive: $(VENV)/.dev ## every order of events around one lease, as far as a minute goes
	@$(BIN)/python -m tests.simulation.exhaustive $(ARGS)

# make soak MINUTES=5; ARGS="--seed 7 --kill"; ARGS="--plant wrong-kv" must fail
MINUTES ?= 30
soak: model ## random traffic and trouble on real engines, both oracles; MINUTES=30
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

mutants: $(VENV)/.dev ## breaks each rule of the lease protocol in turn: does a test see it?
	@$(BIN)/python -m tests.mutation $(ARGS)

bench-controlplane: $(VENV)/.dev ## turns, renewals and sessions of one control plane; QUICK=1, TRACES=path
	@$(BIN)/python -m benchmarks.controlplane $(if $(QUICK),--quick) $(if $(TRACES),--traces $(TRACES)) $(ARGS)

bench-gateway: $(VENV)/.dev ## what the gateway adds to a bare engine, vllm-router beside it; QUICK=1
	@$(BIN)/python -m benchmarks.gateway $(if $(QUICK),--quick) $(ARGS)

bench-idle: model ## what an idle engine that holds ten sessions costs
	@$(BIN)/python -m benchmarks.idle_cpu --model $(MODELS)/tiny $(ARGS)

# Recorded sessions to replay: make bench-retention TRACES=path
TRACES ?=
bench-retention: $(VENV)/.dev ## what the retention policy saves, on recorded sessions; TRACES=path
	@$(BIN)/python -m benchmarks.retention $(if $(TRACES),--traces $(TRACES)) $(ARGS)

# Recorded sessions to replay: make bench-planner TRACES=path
bench-planner: $(VENV)/.dev ## placements compared on recorded sessions, simulated; TRACES=path
	@$(BIN)/python -m benchmarks.planner $(if $(TRACES),--traces $(TRACES)) $(ARGS)

bench-ttft: model ## time to first token, vLLM's own connectors beside it: QUICK=1 TRACES=path
	@$(BIN)/python -m benchmarks.ttft --model $(MODELS)/smollm2 $(if $(QUICK),--quick) \
	  $(if $(TRACES),--traces $(TRACES)) $(ARGS)

clean: ## removes .venv, the models and all caches
	rm -rf $(VENV) $(FRAMEWORKS) $(MODELS) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf clients/typescript/{gen,dist,node_modules} clients/go/{v1,build} clients/java/{gen,build}
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
