.PHONY: install demo test test-slow test-all test-gpu reliability lint lock results clean

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

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is written from results/*.json, the recipes and the behaviour suite: numbers in the docs, the page, the tables.
results: install
	$(BIN)/python -m benchmarks.results_page results docs/results.md
	$(BIN)/batchformer report results/cifar100-lt-100 results/cifar100-lt-200 --out docs/report.html
	$(BIN)/python -m benchmarks.readme_table results README.md
	$(BIN)/python -m benchmarks.stability_page .
	$(BIN)/python -m benchmarks.recipes_page docs/recipes.md
	$(BIN)/python -m benchmarks.domains_section results docs/domains.md
	$(BIN)/python -m benchmarks.models_table README.md docs/attach.md

# The lock names versions only: no index addresses.
lock: install
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-emit-index-url --no-header \
		--upgrade --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) dist build demo
