# `make help` lists the targets. Needs Python 3.11 or newer, make and a package index (only the first time).

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# For example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" to leave the CUDA packages out.
PIP_ARGS ?=

BIN := $(VENV)/bin
# Not in the environment itself: atomc uses them wherever it finds them.
LIBRARIES := $(abspath $(VENV)/libraries)
# Two workers on two cores: one thread each, or they fight. Modules and tests are compiled once, not by each process. PYTEST_ARGS="-k norm" selects tests.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST_ARGS ?=
THIRD ?= 0
SOURCES := atomc passes models runtime tests bench examples docs
# Those of tests/repo that neither build a package nor run programs of pages.
TREE := $(addprefix tests/repo/test_,imports.py rooms.py sentences.py public_api.py dockerfile.py root_files.py)
# pytest-xdist deals the tests of a crashed worker out again, and then waits for ever: the run ends with the name of the test instead.
PARALLEL := -n $(WORKERS) --dist loadgroup --max-worker-restart 0
# setuptools comes first, because building inside the environment lets nothing unpinned in by a side door.
INSTALL = $(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-tree lint docs rooms test-gpu test-libraries test-mutations test-newest test-oldest types types-of-tests clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/installed ## generate text from the embedded demo model
	$(BIN)/atomc generate

test: $(VENV)/installed-test lint ## set up, then lint and run the tests
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-all: $(VENV)/installed-test lint ## as test, with the tests marked slow
	$(TEST_ENV) $(BIN)/python -m pytest -m "" $(PARALLEL) $(PYTEST_ARGS)

test-tree: $(VENV)/installed-test ## the rules about the tree itself, in seconds: rooms, imports, names, pages
	$(TEST_ENV) $(BIN)/python -m pytest -q $(TREE) $(PYTEST_ARGS)

lint: $(VENV)/installed-test ## ruff on the sources, strict mypy on the package, mypy on what tests share
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	@$(MAKE) --no-print-directory --jobs 2 types types-of-tests

# mypy runs on one core.
types:
	$(BIN)/mypy

types-of-tests:
	$(BIN)/mypy --config-file tests/mypy.ini

docs: .venv-docs/installed ## the pages as a site in build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

rooms: ## write docs/rooms.md and its picture from the table of layers and the docstrings
	$(PYTHON) docs/tools/rooms.py

test-gpu: ## the tests that need a GPU, from the tree, with the Python that is there
	$(PYTHON) -c 'from setuptools import setup; setup()' -q egg_info # the entry point, without an installation
	PYTHONPATH=. $(PYTHON) -m pytest tests -m gpu $(PYTEST_ARGS)

test-libraries: $(VENV)/installed-test $(LIBRARIES)/installed ## the tests over AITER's Triton code, zentorch and flash-linear-attention, from the package index
	$(TEST_ENV) ATOMC_AITER_SOURCE=$(LIBRARIES)/aiter $(BIN)/python -m pytest $(PARALLEL) tests/kernels/aiter/test_aiter_proofs.py $(PYTEST_ARGS)
	$(TEST_ENV) PYTHONPATH=$(LIBRARIES)/zentorch $(BIN)/python -m pytest $(PARALLEL) tests/kernels/test_zentorch.py tests/kernels/linear/test_cpu_quant.py tests/kernels/test_kernels.py -k zentorch $(PYTEST_ARGS)
	$(TEST_ENV) PYTHONPATH=$(LIBRARIES)/fla $(BIN)/python -m pytest $(PARALLEL) -m "" tests/kernels/recurrent/test_fla.py $(PYTEST_ARGS)

test-mutations: $(VENV)/installed-test ## bugs by hand must each turn a test red, generated bugs and deleted refusals a share (BUGS=word selects)
	$(BIN)/python tests/repo/mutations/run.py $(BUGS)
	$(BIN)/python tests/repo/mutations/run_refusals.py $(BUGS)

test-newest: .venv-newest/installed ## a third of the tests with the newest version of each library
	$(TEST_ENV) .venv-newest/bin/python -m pytest $(PARALLEL) --third $(THIRD) $(PYTEST_ARGS)

test-oldest: .venv-oldest/installed ## a third of the tests with the oldest versions that pyproject.toml allows
	$(TEST_ENV) .venv-oldest/bin/python -m pytest $(PARALLEL) --third $(THIRD) $(PYTEST_ARGS)

clean: ## remove the environments and what tools left behind
	rm -rf $(VENV) .venv-newest .venv-oldest .venv-docs .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# The stamps make a warm environment work offline: pip runs again only when what is asked for changes.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[hf]' # for the tokenizer
	touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[serve,bench,test]'
	touch $@ $(VENV)/installed

# Without constraints. "torch>=2.11" of pyproject.toml is "torch==2.11.*" here; transformers 5.17 reads images with
# torchvision, and the interpreter of Triton 3.6 does not run with NumPy 2.4.
PINS_newest :=
PINS_oldest := $(shell sed -n 's/.*"\([a-z][a-z]*>=[0-9.]*\)".*/"\1.*"/p' pyproject.toml | sed 's/>=/==/' | sort -u) "numpy<2.4" torchvision

.venv-%/installed: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install $(PIP_ARGS) "setuptools>=77.0.3"
	.venv-$*/bin/python -m pip install $(PIP_ARGS) --no-build-isolation --editable '.[serve,bench,test]' $(PINS_$*)
	touch $@

# Only what the extra `docs` names: pages need neither torch nor the package.
.venv-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install $(PIP_ARGS) --constraint constraints.txt $$(.venv-docs/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(LIBRARIES)/installed: constraints.txt | $(BIN)/python
	rm -rf $(LIBRARIES)
	$(INSTALL) --no-deps --target $(LIBRARIES)/aiter amd-aiter
	$(INSTALL) --no-deps --target $(LIBRARIES)/zentorch zentorch deprecated wrapt
	$(INSTALL) --no-deps --target $(LIBRARIES)/fla fla-core einops
	touch $@
