# The whole menu. `make demo` and `make test` set up what they need on a fresh machine (Debian, Python 3.11+, venv).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Tests that only compute run side by side, on at most 8 cores. All others start processes, or mind the time.
SPREAD        := -n auto --maxprocesses 8
TOGETHER      := tests/unit tests/simulation tests/fuzz
TOGETHER_SLOW := tests/simulation tests/fuzz

.PHONY: help demo test lint types fmt protos test-slow test-root test-containers fuzz soak bench image clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 20

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo]' --group dev
	@touch $@

demo: $(VENV)/.installed  ## train the digits with 4 workers on this machine
	$(BIN)/paceline demo

test: lint types $(VENV)/.installed  ## lint, types, and all tests that need neither root nor containers nor torch
	$(BIN)/pytest $(SPREAD) -m 'not slow and not root and not containers and not benchmark' $(TOGETHER)
	$(BIN)/pytest -m 'not slow and not root and not containers and not benchmark' $(addprefix --ignore=,$(TOGETHER))

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
	$(BIN)/pytest $(SPREAD) -m 'slow and not root and not containers' $(TOGETHER_SLOW)
	$(BIN)/pytest -m 'slow and not root and not containers' $(addprefix --ignore=,$(TOGETHER_SLOW))

test-root: $(VENV)/.installed  ## the tests that need root
	$(BIN)/pytest -m 'root and not containers and not benchmark'

test-containers: $(VENV)/.installed  ## the tests that need a Docker engine
	$(BIN)/pytest -m containers

fuzz: $(VENV)/.installed  ## fuzz one decoder: make fuzz TARGET=frame SECONDS=600
	$(BIN)/pip install --quiet --disable-pip-version-check --group fuzz
	$(BIN)/python tests/fuzz/run.py $(TARGET) --seconds $(or $(SECONDS),60)

soak: $(VENV)/.installed  ## train in a storm of faults: make soak SECONDS=600 SEED=1
	$(BIN)/python tests/elastic/soak.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1)

bench: $(VENV)/.installed  ## measure (tests/benchmarks), with the figures that must hold
	$(BIN)/pytest -m benchmark -s

image:           ## build the container image
	docker build -t paceline -f deploy/Dockerfile .

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
