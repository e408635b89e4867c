# A fresh clone needs python3 (3.11 or newer) and make; targets install their dependencies into .venv.
#
#   make demo           train a classifier on a 100,000-cell atlas with two processes
#   make test           run the core tests
#   make test-programs  run every program, example, launcher, trainer and benchmark
#   make test-faults    run the tests of faults, memory and hostile files, and the property tests in breadth
#   make test-all       run all three
#   make docs           build the site into .cache/site, and execute its tutorials
#   make tutorials-record  run the tutorials that need a memory limit or a browser, and record their output
#   make lowest         run the core tests with the lowest versions of everything
#   make rapids         run the core tests with the versions of RAPIDS 26.02
#   make check          run all that CI does
#
# make PYTHON=python3.12 ... uses another Python.

SHELL := bash
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
DEMO_CELLS ?= 100000
ATLAS := .cache/atlas-$(DEMO_CELLS).h5ad
PYTEST_ARGS ?=
# Many tests wait for ranks, workers and servers of their own: three keep two cores busy.
TEST_PROCESSES ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup --durations 20
# Compiled files are kept, whatever the environment says: tests start some hundred programs.
export PYTHONDONTWRITEBYTECODE :=
FUZZ_SECONDS ?= 30
CHECKS := lint types docs fuzz demo bounds test test-faults test-programs

.PHONY: env demo test test-programs test-faults test-all check lint types bounds fuzz docs tutorials-record lowest rapids clean

env: $(VENV)/.dev

# The demo needs the extra demo, the core tests their own extras, everything else the developers' extras.
$(VENV)/.demo: PACKAGES := .[demo]
$(VENV)/.test: PACKAGES := .[test]
$(VENV)/.dev: PACKAGES := .[dev]
$(VENV)/.test: CONTAINED := $(VENV)/.demo
$(VENV)/.dev: CONTAINED := $(VENV)/.demo $(VENV)/.test
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("dasksc needs Python 3.11 or newer, not %d.%d; try make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'No venv could be made. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo 'Installing $(PACKAGES) into $(VENV): some minutes the first time.'
# torch is installed first and alone, so that an existing CPU build is kept.
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '$(PACKAGES)'
	@touch $(CONTAINED) $@

$(ATLAS): examples/make_atlas.py | $(VENV)/.demo
	$(BIN)/python examples/make_atlas.py --cells $(DEMO_CELLS) --out $@ --overwrite

demo: $(VENV)/.demo $(ATLAS)
	$(BIN)/torchrun --standalone --nproc_per_node=2 examples/train_ddp.py $(ATLAS)

# Modules are dealt out in their order: those of real parts, of few tests that take long, come first.
test: $(VENV)/.test
	$(PYTEST) --no-loadscope-reorder -m core $(PYTEST_ARGS)

test-programs: $(VENV)/.dev
	$(PYTEST) -m programs $(PYTEST_ARGS)

# Property tests run again here, with more examples.
test-faults: $(VENV)/.dev
	$(PYTEST) -m 'faults or hypothesis' --hypothesis-profile thorough $(PYTEST_ARGS)

test-all: test test-programs test-faults

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# The tests of the kernels run again with bounds checks.
bounds: $(VENV)/.dev
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup tests/unit/kernels tests/unit/storage/test_codecs.py tests/unit/storage/test_storage_fast.py tests/unit/transforms/test_tokens.py

# Damaged files, read by two processes for half a minute.
fuzz: $(VENV)/.dev
	fuzz="$(BIN)/python -W ignore tests/programs/fuzz.py --seconds $(FUZZ_SECONDS)"; \
	    $$fuzz --seed 0 & first=$$!; $$fuzz --seed 1000000; second=$$?; wait $$first && exit $$second

# The site; a warning is an error, and so is a cell of a tutorial that raises.
docs: $(VENV)/.dev
	$(BIN)/python docs/prose.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d .cache/doctrees docs .cache/site

# Output and pictures of the tutorials that the site does not execute. A control group needs root, and a picture chromium.
tutorials-record: $(VENV)/.dev
	$(BIN)/python docs/tutorials/record.py

# The core tests with the lowest versions that pyproject.toml allows, but for torch, whose other builds are of gigabytes.
# Such old versions warn about newer dependencies.
lowest:
	test -x .venv-lowest/bin/uv || { $(PYTHON) -m venv .venv-lowest && .venv-lowest/bin/python -m pip install --quiet --no-deps uv "$$(grep '^torch==' constraints.txt)"; }
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[test]' "$$(grep '^torch==' constraints.txt)"
	.venv-lowest/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup -m core -W ignore::DeprecationWarning \
	    -W ignore::PendingDeprecationWarning -W ignore::FutureWarning $(PYTEST_ARGS)

# The core tests beside the versions of Dask, numba, pandas and NumPy that RAPIDS 26.02 asks for, and scanpy; pip must
# resolve them with dasksc.
rapids:
	$(MAKE) VENV=.venv-rapids CONSTRAINTS=constraints-rapids.txt test

# The quickest first; says what each took, in seconds on the clock and of processors, and ends at the first that fails.
check: $(VENV)/.dev
	@for part in $(CHECKS); do \
	    TIMEFORMAT="make $$part: %0R s, %0U s of user time, %0S s of system time"; \
	    time $(MAKE) --no-print-directory $$part || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-lowest .venv-rapids .cache docs/generated build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
