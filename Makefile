.PHONY: install demo test test-slow test-all test-gpu test-oldest reliability lint docs dist lock results clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where the environment forbids to keep bytecode, every start compiles all of torch and lightning anew: ten seconds.
export PYTHONDONTWRITEBYTECODE :=

install: $(VENV)/.installed

# uv picks a torch and a torchvision that fit each other; pip alone may not.
$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

demo: install
	$(BIN)/batchformer compare digits-lt --seeds 3 --out demo --overwrite

# Two workers: what a promise costs is measured on two cores. The time of a recipe, beside what it may take:
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal --durations=10
LIBRARY := $(addprefix tests/,nn attach mix losses metrics analysis)
TOOK = took=$$(( $$(date +%s) - begin )); echo "make $@: $$((took / 60)) min $$((took % 60)) s of $(1)"

# Each promise on each mechanism once, every kind of recipe, kill and resume, the browser. The library's own tests run
# by themselves, with every annotated shape checked.
test: install
	@begin=$$(date +%s); code=0; \
	$(PYTEST) -m "not slow and not gpu and not shapes" || code=1; \
	CHECK_SHAPES=1 $(PYTEST) -m "not slow and not gpu and shapes" $(LIBRARY) || code=1; \
	$(call TOOK,10); exit $$code

# What `make test` leaves out: the same promises on all other models, recipes and sizes.
test-slow: install
	@begin=$$(date +%s); code=0; $(PYTEST) -m "slow and not gpu" || code=1; $(call TOOK,15); exit $$code

test-all: install
	@begin=$$(date +%s); code=0; $(PYTEST) -m "not gpu" || code=1; $(call TOOK,25); exit $$code

# On a machine with a GPU; writes benchmarks/results/gpu_tests.json. Without $(VENV), with the python that is there.
test-gpu:
	@begin=$$(date +%s); code=0; \
	PYTHONPATH=src:$$PYTHONPATH $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu_tests || code=1; \
	$(call TOOK,10); exit $$code

# Kills, full disks, damaged and hostile files, memory: half an hour or more; writes docs/reliability.md.
reliability: install
	$(BIN)/python -m benchmarks.reliability

# The lowest versions that pyproject.toml allows, in an environment of their own; the library's tests and one training.
OLDEST := build/oldest
test-oldest: install
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(BIN)/uv pip compile --quiet pyproject.toml --extra train --python $(OLDEST)/bin/python --resolution lowest-direct \
		--no-emit-index-url --no-header --output-file $(OLDEST)/requirements.txt
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python -r $(OLDEST)/requirements.txt \
		pytest hypothesis beartype accelerate pycocotools
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps --editable .
	$(OLDEST)/bin/python -m pytest -q -m "not slow and not gpu" $(addprefix tests/,nn attach mix losses metrics)
	$(OLDEST)/bin/batchformer fit digits-lt --trainer.max_epochs 2 --out $(OLDEST)/run --overwrite

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is written from results/*.json, the recipes and the behaviour suite: numbers in the docs, the page, the tables.
results: install
	$(BIN)/python -m benchmarks.pages

# The site, in build/docs; warnings are errors. The examples are run first, those that have not changed since only once.
docs: install
	$(BIN)/python -m benchmarks.run_examples build/examples
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "make docs: open build/docs/index.html (searching needs a server: python -m http.server -d build/docs)"

# sdist and wheel: built, checked, and the wheel tried in an environment that has nothing else of this repository.
dist: install
	rm -rf dist build/installed
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/uv tool run twine check --strict dist/*
	$(BIN)/python -m pytest -q tests/house/test_wheel.py
	$(BIN)/uv venv --quiet --python $(BIN)/python build/installed
	$(BIN)/uv pip install --quiet --python build/installed/bin/python --constraints requirements.lock "$$(ls dist/*.whl)[train]"
	cd build && installed/bin/batchformer fit digits-lt --trainer.max_epochs 2 --out installed/run

# The lock names versions only: no index addresses.
lock: install
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-emit-index-url --no-header \
		--upgrade --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) dist build demo
