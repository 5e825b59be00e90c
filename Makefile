# Set-up is part of every target: `make demo` and `make test` work on a fresh machine.
# Other Pythons, environments and sets: make test PYTHON=python3.12 VENV=.venv-312 CONSTRAINTS=constraints-oldest.txt

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
TESTS ?= tests
BIN := $(abspath $(VENV))/bin

# Two workers of one thread each beat one worker of two; passive waiting keeps busy neighbours from stalling both.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "not slow and not gpu" --durations=10

.DEFAULT_GOAL := help
.PHONY: help install demo demo-train test lint format types examples wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | sort

install: $(VENV)/.ready ## create the environment (editable install, pinned set)

# torch goes first and alone: a CPU wheel named by pip's own settings (find-links, extra index) is then kept.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: install ## the main job on a real model: speed-up, acceptance length, identity with plain greedy
	OMP_WAIT_POLICY=passive $(BIN)/hf-specgen bench --demo

# The prompts of the measurement are the ones behind those that were trained on. A quick look: make demo-train TASKS=60
TASKS ?= 2560
TRAINED := runs/demo-train
demo-train: install ## train a drafter for SmolLM2-135M on two cores and measure it on other prompts (about an hour)
	mkdir -p $(TRAINED)
	OMP_WAIT_POLICY=passive $(BIN)/hf-specgen regenerate --task-prompts $(TASKS) --max-new-tokens 160 --batch-size 64 --prepack \
	    --out $(TRAINED)/answers.jsonl
	test -f $(TRAINED)/features/cache.json || OMP_WAIT_POLICY=passive $(BIN)/hf-specgen features \
	    --data $(TRAINED)/answers.jsonl --out $(TRAINED)/features --batch-size 16
	OMP_WAIT_POLICY=passive $(BIN)/hf-specgen train eagle3 --config examples/demo_train.yaml
	OMP_WAIT_POLICY=passive $(BIN)/hf-specgen bench --drafter prompt-lookup+learned:$(TRAINED)/drafter \
	    --task-prompts 20 --task-skip $(TASKS) --repeats 1 --max-new-tokens 96 --out $(TRAINED)/bench

test: install ## the test suite (no network, no accelerator)
	$(TEST_ENV) $(PYTEST) $(TESTS)

lint: install ## style and complexity
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The mapped folders are seen only in the wheel, so that is what is checked; the folder below is the wheel, unpacked.
types: wheel ## mypy on the built wheel
	cd build/unpacked && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p hf_specgen

examples: install ## run every example in its small form
	set -e; for file in examples/*.py; do echo "== $$file"; $(TEST_ENV) $(BIN)/python "$$file" --smoke; done

# build/lib would carry files that were deleted since, into the wheel.
wheel: install ## build the wheel into build/dist
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	$(BIN)/python -m zipfile -e build/dist/*.whl build/unpacked

clean: ## remove what was built (not the environments)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
