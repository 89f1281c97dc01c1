.PHONY: install demo test lint lock results clean

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

test: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is written from results/*.json and the recipes: the numbers in the docs, the page, the table of the README.
results: install
	$(BIN)/python -m benchmarks.results_page results docs/results.md
	$(BIN)/batchformer report results/cifar100-lt-100 results/cifar100-lt-200 --out docs/report.html
	$(BIN)/python -m benchmarks.readme_table results README.md
	$(BIN)/python -m benchmarks.stability_page .
	$(BIN)/python -m benchmarks.recipes_page docs/recipes.md

# The lock names versions only: no index addresses.
lock: install
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-emit-index-url --no-header \
		--upgrade --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) dist build demo
