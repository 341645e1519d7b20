# `make demo` and `make test` do all set-up themselves: a Python 3.11 or newer, pip, make and g++ are enough.
#   PYTHON=python3.12   the interpreter that .venv is made from
#   TORCH=...           what pip installs when the interpreter has no torch that sees a GPU, for example
#                       TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
#   KILL=2              the demo kills this rank while the model writes
#   HOSTS=2             the demo's ranks count as ranks of so many hosts: network namespaces joined by veth,
#                       where CPU ranks run and this machine lets them be made, else the loopback
#   PYTEST_ARGS='-k x'  passed on to pytest
#   JOBS=3              tests at a time: one more than cores, since some wait for a deadline, asleep
#   WEFT_SKIP_SPIN=1    test without the SPIN model checker
#   OUT=build/gpu       where `make gpu` leaves logs, figures and pictures
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
JOBS ?= 3
OUT ?= build/gpu

BIN := .venv/bin
RUNS := .venv/.runs
READY := .venv/.ready
SITE := .venv-docs/.ready
CPP_FILES = $(shell find weft tests -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' -o -name '*.hpp')
HAS_GPU_TORCH := import torch; raise SystemExit(not torch.cuda.is_available())

PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Bytecode is kept, whatever the shell says: every worker, rank and program of a test imports the same files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-gpu check docs bench gpu format clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(RUNS)
	$(BIN)/weft demo $(if $(KILL),--kill $(KILL)) $(if $(HOSTS),--hosts $(HOSTS))

# Checks, and all tests that are neither slow nor of GPUs. The checks run beside the tests and are heard of only if they fail:
# pytest's closing line is the last thing to read.
test: $(READY)
	@mkdir -p build; $(MAKE) --no-print-directory check >build/check.txt 2>&1 & check=$$!; \
	trap "kill $$check" INT TERM; $(PYTEST) -m 'not slow and not gpu' $(PYTEST_ARGS); tests=$$?; \
	wait $$check || { cat build/check.txt >&2; exit 1; }; exit $$tests

# State spaces, emulated kernels, broken kernels, machine code and soaks.
test-slow: $(READY)
	$(PYTEST) -m 'slow and not gpu' $(PYTEST_ARGS)

# Tests of GPUs, as many as this machine has the GPUs for; one at a time, since they share them.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_cpp.py
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run -Werror $(CPP_FILES))

# The site, guides and API reference: build/docs/index.html. It has an environment of its own, since it needs no torch.
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet

bench: $(READY)
	$(BIN)/weft bench

# On a machine with GPUs: tests, sanitizer, litmus and benchmarks, each step with a deadline.
gpu: $(READY)
	PYTHON=$(CURDIR)/$(BIN)/python benchmarks/accept.sh all $(OUT)

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

clean:
	rm -rf .venv .venv-docs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What weft needs to run, and its demo. A machine whose torch sees a GPU keeps that torch; any other gets $(TORCH). Debian parts
# ensurepip from python3, so without it the system's pip fills the environment.
$(RUNS): pyproject.toml
	@$(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' || \
	    { echo 'weft needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	@test ! -L .venv || { echo '.venv is a link and out of date: run make in the checkout that it links to, or remove the link' >&2; exit 1; }
	@site=; if $(PYTHON) -c '$(HAS_GPU_TORCH)' 2>/dev/null; then site=--system-site-packages; fi; \
	echo "setting up .venv $$site"; \
	$(PYTHON) -m venv $$site .venv >/dev/null 2>&1 || \
	    { $(PYTHON) -m venv --clear --without-pip $$site .venv && \
	      $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -c '$(HAS_GPU_TORCH)' 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip uninstall --yes --quiet weft  # the earlier name of this package, with the same entry points
	extras=transformers; if $(BIN)/python -c '$(HAS_GPU_TORCH)' 2>/dev/null; then extras=gpu,transformers; fi; \
	$(BIN)/python -m pip install -e ".[$$extras]"
	touch $@

# And what its tests need.
$(READY): $(RUNS)
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

# What the site needs: the packages of the extra `docs`, and not weft itself.
$(SITE): pyproject.toml
	$(PYTHON) -m venv .venv-docs >/dev/null 2>&1 || \
	    { $(PYTHON) -m venv --clear --without-pip .venv-docs && $(PYTHON) -m pip --python .venv-docs/bin/python install pip; }
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    >.venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet -r .venv-docs/requirements.txt
	touch $@
