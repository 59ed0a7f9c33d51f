# Needs make and Python 3.11 or newer; everything else is installed into .venv by the first target that wants it.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COVERAGE := $(if $(CI),--cov=fedrane --cov-report=term:skip-covered)  # a fifth slower
DEMO_METHODS := fedavg,spherefed,fedrane
DEMO := dataset=digits clients=20 partition.alpha=0.1 batch=16 rounds=10

.PHONY: help demo test test-slow test-all test-deploy fuzz mutations check resolve dist package notebooks bench docs clean
.DEFAULT_GOAL := help

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Compare three methods on a dataset that is built in, and draw what came out (about a minute)
	@rm -rf runs/demo
	$(BIN)/fedrane compare --methods $(DEMO_METHODS) $(DEMO) --out runs/demo
	@echo "table: runs/demo/table.md; settings, metrics and checkpoints: runs/demo/METHOD/seed-0"
	@echo "open this page in a browser: $(CURDIR)/runs/demo/report.html"
	@echo "next: source .venv/bin/activate, then fedrane --help"

check: $(READY) ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## Check, then the tests that are not marked slow (within 8 minutes on two cores)
	$(BIN)/pytest -n 2 -m 'not slow' --ignore tests/deploy $(COVERAGE)

test-slow: $(READY) ## What make test leaves out: slow tests, the examples in docstrings, test-deploy
	$(BIN)/pytest -n 2 -m slow --ignore tests/deploy
	$(BIN)/pytest --doctest-modules --ignore-glob='*/kernels/gpu/*' src  # which need Triton
	$(MAKE) test-deploy

test-all: test test-slow ## Check, then every test

fuzz: $(READY) ## Every file operation failing once, a thousand kills (hours), then random inputs until one fails or Ctrl-C
	$(BIN)/python tests/fuzz/faults.py
	$(BIN)/python tests/fuzz/kills.py
	@while true; do \
		again="FEDRANE_FUZZ=20 $(BIN)/pytest -m slow tests/fuzz --hypothesis-seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')"; \
		echo "$$again"; env $$again || exit 1; \
	done

mutations: $(READY) ## Put one defect at a time into the library; fails where no law notices it (some minutes)
	$(BIN)/python tests/mutations/run.py

test-deploy: $(READY) ## A federation with real processes, by the commands of docs/deploy.md (minutes)
	$(BIN)/pytest -v tests/deploy --durations=0 --durations-min=1

resolve: $(READY) ## Whether what pyproject.toml and constraints.txt allow can be installed elsewhere (metadata alone)
	$(BIN)/python tests/install/resolve.py

dist: $(READY) ## Build sdist and wheel into dist/, and check what an index would refuse
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

package: dist ## Build both, and try them in a new environment, also with the lowest versions (minutes)
	$(BIN)/python tests/install/package.py

notebooks: $(READY) ## Run the tutorials in examples/ and make notebooks of them, with their output (minutes)
	$(BIN)/python examples/notebooks.py

bench: $(READY) ## Run every program in benchmarks/
	@found=; for program in benchmarks/[!_]*.py; do \
		[ -e "$$program" ] || continue; \
		found=yes; echo "== $$program"; $(BIN)/python "$$program" || exit 1; \
	done; \
	[ -n "$$found" ] || echo "no benchmarks yet: benchmarks/ holds no program"

docs: $(READY) ## Build the site into build/docs/site, with warnings as errors and links checked
	$(BIN)/python docs/build_site.py

clean: ## Remove what make has made: .venv, caches, build files (runs/ stays)
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment of another Python than the one asked for is rebuilt.
VERSION := -c 'import sys; print(sys.version_info[:2])' 2>/dev/null
ifneq ($(shell $(PYTHON) $(VERSION)),$(shell $(BIN)/python $(VERSION)))
.PHONY: $(READY)
CLEAR := --clear
endif

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "fedrane needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>/dev/null || echo 'not there')." \
			"Name another one: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv $(CLEAR) .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,report,flower,docs]'
	@touch $@
