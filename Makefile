# Needs Python 3.11 or newer, make and a package index. Everything lands in .venv; `make clean` undoes it.

PYTHON ?= python3
BIN    := .venv/bin
ARGS   ?=

# Stamps are named after the content they stand for, so an unchanged lock costs nothing and a changed one reinstalls.
KEY       := $(shell cat pyproject.toml requirements-bootstrap.txt requirements.lock | cksum | cut -d' ' -f1)
BENCH_KEY := $(shell cat requirements.lock requirements-bench.lock | cksum | cut -d' ' -f1)
INSTALLED       := .venv/.installed-$(KEY)
BENCH_INSTALLED := .venv/.bench-installed-$(BENCH_KEY)

# uv does not read pip's settings: trust the system's certificates and use the index that pip would use.
UV_SYSTEM_CERTS ?= 1
export UV_SYSTEM_CERTS
UV := UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(BIN)/python -m pip config get global.index-url 2>/dev/null)}}" $(BIN)/uv
LOCK := $(UV) pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header \
	--no-strip-extras --python-version 3.11

# Hundreds of processes import this code in a run of the tests: where Python was told to keep no bytecode, each of them
# would compile it again. `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

# $(call install,file): from a lock with hashes, by uv, or by pip where uv cannot be used.
install = $(UV) pip install --python $(BIN)/python --require-hashes --compile-bytecode -r $(1) \
	|| { echo "uv could not install $(1), trying pip"; $(BIN)/python -m pip install --require-hashes -r $(1); }

# Spark needs Java: that of the machine, or else the one from the package index.
SPARK = eval "$$($(BIN)/python -m omnirelay_dagster.doctor --export)" &&

.DEFAULT_GOAL := help
.PHONY: help install test test-slow check demo dev bench sim lock proto screenshots clean

help: ## show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## create .venv from requirements.lock (costs nothing when it is up to date)

$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make install PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-bootstrap.txt || echo "no uv for this machine"
	$(call install,requirements.lock)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@rm -f .venv/.installed-*; touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(call install,requirements-bench.lock)
	@rm -f .venv/.bench-installed-*; touch $@

test: $(INSTALLED) ## run the tests (ARGS="-k lease" to choose)
	@# kills and clocks share two cores with other tests: what fails beside them must pass alone, or the run fails
	@$(SPARK) { $(BIN)/python -m pytest -n 3 --durations=15 $(ARGS) \
		|| { echo "AGAIN, ALONE: what failed above"; $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS); }; }

test-slow: $(INSTALLED) ## the tests that take long
	$(SPARK) $(BIN)/python -m pytest -m slow $(ARGS)

check: $(INSTALLED) ## formatting, lint, types and import rules
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

demo: $(INSTALLED) ## run the demo fabric once and show what happened
	$(BIN)/python -m definitions.demo $(ARGS)
	$(SPARK) $(BIN)/python -m definitions.fabric_demo

dev: $(INSTALLED) ## open the demo fabric in Dagster's UI
	@mkdir -p .demo/dagster && cp definitions/dagster.yaml .demo/dagster/
	$(SPARK) DAGSTER_HOME="$(CURDIR)/.demo/dagster" $(BIN)/python -m dagster dev -m definitions $(ARGS)

bench: $(BENCH_INSTALLED) ## measure against other queues
	$(SPARK) $(BIN)/python -m benchmarks $(ARGS)

sim: $(INSTALLED) ## run the simulator (ARGS="--help" for its options)
	$(BIN)/python -m tests.simulation $(ARGS)

lock: $(INSTALLED) ## resolve the lock files again after a change of dependencies
	$(LOCK) --all-extras --group dev pyproject.toml -o requirements.lock
	$(LOCK) --group bench -c requirements.lock -o requirements-bench.lock
	$(LOCK) --group docs -c requirements.lock -o requirements-docs.lock

proto: $(INSTALLED) ## generate the hub's gRPC code again
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. lease_core/replication/hub/hub.proto

screenshots: $(INSTALLED) ## take the pictures in docs/images (needs Chromium)
	$(call install,requirements-docs.lock)
	$(BIN)/python docs/screenshots/take.py $(ARGS)

clean: ## remove .venv, caches, demo data and build output
	rm -rf .venv .demo .tmp_dagster_home_* build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
