# A fresh clone needs python3 (3.11 or newer) and make; targets install their dependencies into .venv.
#
#   make demo           train a classifier on a 100,000-cell atlas with two processes
#   make test           run the core tests
#   make test-programs  run the programs of the documentation, examples, launchers, trainers and small benchmarks
#   make test-faults    run the tests of faults, memory and hostile files, and the property tests with more examples
#   make test-all       run all three kinds of tests
#   make docs           build the site into .cache/site, and execute its tutorials
#   make tutorials-record  run the tutorial that needs a memory limit, and record its output
#   make lowest         run the core tests with the lowest versions of the dependencies
#   make rapids         run the core tests with the versions that RAPIDS 26.02 requires
#   make check          run all checks of CI
#
# make PYTHON=python3.12 ... uses another Python interpreter.

SHELL := bash
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
DEMO_CELLS ?= 100000
ATLAS := .cache/atlas-$(DEMO_CELLS).h5ad
PYTEST_ARGS ?=
# Many tests wait for ranks, workers and servers, so three processes keep two cores busy.
TEST_PROCESSES ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup --max-worker-restart 0 --durations 20
# The tests start many programs, and bytecode files make this faster.
export PYTHONDONTWRITEBYTECODE :=
FUZZ_SECONDS ?= 30
# The quickest check comes first. Types are checked and the site is built by one process each, so the other short checks
# run beside them. A test of `make test-faults` reads damaged files, too; `make fuzz` does so for longer.
FIRST := lint
SHORT_CHECKS := docs types bounds demo
TESTS := test-faults test-programs

.PHONY: env demo test test-programs test-faults test-all check lint types bounds fuzz docs tutorials-record lowest rapids clean

env: $(VENV)/.dev

# `make demo` needs the extra `demo`, `make test` the extra `test`, and most other targets the extra `dev`.
$(VENV)/.demo: PACKAGES := .[demo]
$(VENV)/.test: PACKAGES := .[test]
$(VENV)/.dev: PACKAGES := .[dev]
$(VENV)/.test: CONTAINED := $(VENV)/.demo
$(VENV)/.dev: CONTAINED := $(VENV)/.demo $(VENV)/.test
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("dasksc needs Python 3.11 or newer, not %d.%d; try make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'The venv cannot be created. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo 'Installing $(PACKAGES) into $(VENV), which takes some minutes the first time.'
# torch is installed first and alone, so that an existing CPU build is kept. Python compiles modules when they are first
# imported; pip would compile all of them, which takes a minute.
	$(BIN)/python -m pip install --quiet --no-compile "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable '$(PACKAGES)'
	@touch $(CONTAINED) $@

$(ATLAS): examples/make_atlas.py | $(VENV)/.demo
	$(BIN)/python examples/make_atlas.py --cells $(DEMO_CELLS) --out $@ --overwrite

demo: $(VENV)/.demo $(ATLAS)
	$(BIN)/torchrun --standalone --nproc_per_node=2 examples/train_ddp.py $(ATLAS)

# Modules run in the order of collection: those with few but slow tests of real components come first.
test: $(VENV)/.test
	$(PYTEST) --no-loadscope-reorder -m core $(PYTEST_ARGS)

# These wait for other programs longer than the core tests do.
test-programs test-faults: TEST_PROCESSES := 4

test-programs: $(VENV)/.dev
	$(PYTEST) -m programs $(PYTEST_ARGS)

# The property tests run again, with more examples.
test-faults: $(VENV)/.dev
	$(PYTEST) -m 'faults or hypothesis' --hypothesis-profile thorough $(PYTEST_ARGS)

test-all: test test-programs test-faults

# Only `_compat` imports private names of other libraries (PLC2701).
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLC2701 --exclude dasksc/_compat dasksc
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --config pyproject.toml

types: $(VENV)/.dev
	$(BIN)/mypy

# The tests of the kernels, and of what mostly calls them, run again with bounds checks.
bounds: $(VENV)/.dev
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m core tests/unit/kernels tests/unit/plan/test_cell_sets.py tests/unit/plan/test_per_batch.py tests/unit/plan/test_sampling.py tests/unit/storage/test_codecs.py tests/unit/storage/test_storage.py tests/unit/transforms

# Two processes read damaged files for half a minute.
fuzz: $(VENV)/.dev
	fuzz="$(BIN)/python -W ignore tests/programs/fuzz.py --seconds $(FUZZ_SECONDS)"; \
	    $$fuzz --seed 0 & first=$$!; $$fuzz --seed 1000000; second=$$?; wait $$first && exit $$second

# Build the site; warnings and exceptions in tutorial cells are errors.
docs: $(VENV)/.dev
# The theme copies its logo before Sphinx creates the folder, so an interrupted build would leave a file of that name.
	[ -d .cache/site/_static ] || { rm -f .cache/site/_static; mkdir -p .cache/site/_static; }
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d .cache/doctrees docs .cache/site

# Record the output of the tutorial that the site does not execute. Memory limits (cgroups) need root.
tutorials-record: $(VENV)/.dev
	$(BIN)/python docs/tutorials/record.py

# Run the core tests with the lowest versions that pyproject.toml allows. The version of torch is that of constraints.txt,
# since each further build takes gigabytes. Old versions warn about newer dependencies.
lowest:
	test -x .venv-lowest/bin/uv || { $(PYTHON) -m venv .venv-lowest && .venv-lowest/bin/python -m pip install --quiet --no-deps uv "$$(grep '^torch==' constraints.txt)"; }
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[test]' "$$(grep '^torch==' constraints.txt)"
	.venv-lowest/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup -m core -W ignore::DeprecationWarning \
	    -W ignore::PendingDeprecationWarning -W ignore::FutureWarning $(PYTEST_ARGS)

# Run the core tests with scanpy and the versions of Dask, numba, pandas and NumPy that RAPIDS 26.02 requires; pip must
# resolve them together with dasksc.
rapids:
	$(MAKE) VENV=.venv-rapids CONSTRAINTS=constraints-rapids.txt test

# Run all checks, print the wall-clock and CPU time of each, and stop at the first failure.
check: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(FIRST:%=timed-%)
	@$(MAKE) --no-print-directory timed-test
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(SHORT_CHECKS:%=timed-%)
	@$(MAKE) --no-print-directory --jobs 1 $(TESTS:%=timed-%)

timed-%:
	@TIMEFORMAT="make $*: %0R s, %0U s of user time, %0S s of system time"; time $(MAKE) --no-print-directory $*

clean:
	rm -rf $(VENV) .venv-lowest .venv-rapids .cache docs/generated build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
