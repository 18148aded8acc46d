# `make train` and `make test` work on a fresh machine: each makes .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: train test fast-tests test-all check site dist clean

train: .venv/installed
	$(BIN)/paragan train digits

# Tests of pages need Chromium, tests of launchers Slurm and Open MPI, tests of servers nginx; they are
# skipped without them:
# apt-get install --no-install-recommends chromium slurm-wlm munge openmpi-bin nginx-light
test: check fast-tests

fast-tests: .venv/installed
	$(BIN)/python -m pytest -n 3

# The tests that are marked slow too: before a release, and after changes to what they test.
test-all: .venv/installed check
	$(BIN)/python -m pytest -n 3 --slow

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation, as tests/test_site.py builds it too: open site/index.html.
site: .venv/installed
	$(BIN)/python -m mkdocs build --strict

# The archives of a release (docs/releasing.md), from the files of its tag alone.
PYTHON_OF_DIST ?= $(BIN)/python
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' paragan/core/version.py)
dist:
	@git diff --quiet HEAD || { echo "there are changes that are not committed" >&2; exit 1; }
	@git tag --points-at HEAD | grep -qx "v$(VERSION)" || { echo "no tag v$(VERSION) at this commit: git tag v$(VERSION)" >&2; exit 1; }
	rm -rf dist build/dist && mkdir -p build/dist
	git archive "v$(VERSION)" | tar -x -C build/dist
	$(PYTHON_OF_DIST) -m build --no-isolation --outdir dist build/dist
	$(PYTHON_OF_DIST) -m twine check --strict dist/*

# pip compiles packages on one core, compileall on all; some files of packages are for newer versions of Python.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "paragan needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -W ignore -m compileall -qq -j 0 .venv || true
	touch $@

clean:
	rm -rf .venv build site *.egg-info
