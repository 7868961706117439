# make demo    what a newcomer runs first        make test    lint, types and tests
# make test-all                                  the same and the long versions of tests
# make test-gpu, make test-crash                 suites that need a GPU or more time
# make test-torch                                the tests with the lowest supported torch
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint test-torch test-gpu test-crash browser clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/inrun demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# Within 10 minutes on two busy cores. Tests marked "slow" are left out (pyproject.toml).
test: lint browser
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: lint browser
	INRUN_KILLS=10 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

# The tests with the lowest torch of the range in pyproject.toml, in an environment of its own.
# TORCH_INDEX has builds for the CPU; without them pip takes the one for CUDA, several gigabytes.
LOWEST := .venv-lowest
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || python3 -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --upgrade pip
	$(LOWEST)/bin/pip install --quiet -c constraints-lowest.txt \
	  --extra-index-url $(TORCH_INDEX) torch
	$(LOWEST)/bin/pip install --quiet -c constraints-lowest.txt -e '.[dev]'
	touch $@

test-torch: $(LOWEST)/.installed browser
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal

# The zoo and the estimators on a CUDA GPU, with the Python that has one.
test-gpu:
	PYTHONPATH=src python3 benchmarks/gpu_suite.py

test-crash: $(STAMP)
	INRUN_KILLS=50 $(BIN)/python -m pytest tests/ledger/test_store.py tests/run/test_kill.py -k killed -s

# Report tests open a real browser; without one they are skipped and say so.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq >/dev/null && apt-get install -y -qq chromium chromium-driver >/dev/null; } || \
	  echo "chromium and chromium-driver are not installed: browser tests will be skipped"

clean:
	rm -rf $(VENV) $(LOWEST) build dist runs .hypothesis .pytest_cache .ruff_cache .mypy_cache
