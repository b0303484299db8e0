# Every target sets up what it needs: the Python environment in .venv, and for the book the scripts that the
# site serves. `make test` also needs a browser and says how to get one if it cannot install it itself.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

# A Python to make the environment with; found by tools/python.sh where none is named.
PYTHON ?=
# A browser for the tests; found by tools/chromium.sh where none is named.
CHROMIUM ?=
PORT ?= 8000
# Further arguments: make lab LAB_ARGS="--no-browser --port=8890"; make record RECORD_ARGS=--check
LAB_ARGS ?=
RECORD_ARGS ?=
PYTEST_ARGS ?=
export PYTHON CHROMIUM

RUN := .venv/bin/python
# Four workers at most: each one loads torch.
PYTEST := $(RUN) -m pytest -n auto --maxprocesses 4

.PHONY: help book serve test check lint lab record clean environment vendor browser fast-tests

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

book: environment vendor ## build the book, executing its chapters, into _build/html
	@$(RUN) book/build.py

serve: book ## build the book and serve it on localhost (PORT=8000)
	@echo "http://localhost:$(PORT)/  (Ctrl-C ends it)"
	@$(RUN) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

# Two runs, for a test that drives a browser leaves an event loop behind that others cannot share.
test: lint browser book ## everything: lint, the book built and driven in a browser, all tests
	$(PYTEST) -m "not browser" $(PYTEST_ARGS)
	$(PYTEST) -m browser tests/browser $(PYTEST_ARGS)

check: lint fast-tests ## lint and the fast tests: no book, no browser

# What cannot be among them is not even loaded, and what was compiled for one run serves the next.
fast-tests: environment
	env -u PYTHONDONTWRITEBYTECODE $(PYTEST) -m "not browser and not slow and not gpu" --ignore=tests/browser --ignore=tests/gpu $(PYTEST_ARGS)

lint: environment ## formatting, style and types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

lab: environment ## open the chapters as notebooks in JupyterLab, in the folder lab (LAB_ARGS=...)
	@$(RUN) tools/lab.py --lab-args="$(LAB_ARGS)"

record: environment ## measure every recording of the book anew: needs a CUDA GPU (RECORD_ARGS=...)
	@.venv/bin/gpucourse record $(RECORD_ARGS)

clean: ## remove what was built, but not the environment nor the folder lab
	rm -rf _build .jupyter_cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests book tools -name __pycache__ -type d -prune -exec rm -rf {} +

environment:
	@python=$$(sh tools/python.sh) && "$$python" tools/environment.py

vendor: environment
	@$(RUN) tools/vendor.py

browser:
	@sh tools/chromium.sh
