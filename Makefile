# make lab        opens the table of contents      make demo   the same job, no browser
# make test       runs the tests                   make lint   ruff and mypy
# make test-all   those, and more cases of some: every family of models on real ranks
# make test-fast  those of the small package (params, own, core, predict, checkpoint) that start no process
# make test-light all that start no process: no ranks, browser, kernels or Slurm
# make slides     the workshop's deck, as HTML and PDF, into slides/build
PYTHON ?= python3
BIN := .venv/bin
# In a container one often is root, which JupyterLab refuses unless told.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab demo test test-all test-fast test-light lint slides
.DEFAULT_GOAL := demo

lab: .venv/.installed
	@dir=$$($(BIN)/jupyter --runtime-dir); mkdir -p "$$dir" 2>/dev/null && test -w "$$dir" || { \
	  echo "JupyterLab cannot write in $$dir; give it another home: HOME=\$$(mktemp -d) make lab"; exit 1; }
	$(BIN)/jupyter lab $(AS_ROOT) --ServerApp.root_dir='$(CURDIR)' --LabApp.default_url=/lab/tree/notebooks/contents.ipynb

demo: .venv/.installed
	$(BIN)/mmfsdp run --config tiny --launch.name demo --launch.replace

test: .venv/.installed-test
	$(BIN)/python -m pytest -n 3 -m 'not extended'

test-all: .venv/.installed-test
	$(BIN)/python -m pytest -n 3

SMALL_PACKAGE := $(addprefix tests/,params own core predict checkpoint test_style.py test_layers.py)
test-fast: .venv/.installed-test
	$(BIN)/python -m pytest -n 2 -m 'not real' $(SMALL_PACKAGE)

test-light: .venv/.installed-test
	$(BIN)/python -m pytest -n 2 -m 'not real and not extended'

slides: .venv/.installed
	$(BIN)/python slides/build.py

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An older Python could not even read install.py.
INSTALL = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'mmfsdp needs Python 3.10 or newer as $(PYTHON). Name one: make PYTHON=python3.11 $(MAKECMDGOALS)'; exit 1; }; \
	$(PYTHON) install.py

# The stamps make a second `make demo` start at once: pip runs again only when pyproject.toml has changed.
.venv/.installed: pyproject.toml
	$(INSTALL)
	@touch $@

.venv/.installed-test: pyproject.toml
	$(INSTALL) test
	@touch $@ .venv/.installed
