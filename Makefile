# Two commands: `make demo` and `make test`. Both set up .venv by themselves and are fast the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# also for the isolated environments in which packages are built, which `pip -c` does not reach
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_REQUIRE_VIRTUALENV := 1
# with it, every process of the tests would compile what it imports
unexport PYTHONDONTWRITEBYTECODE
# one more than cores: many tests wait for something to end, to die or to be noticed; the long ones also measure
TESTERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')

.PHONY: help demo test redis-server compiled-tests test-quick test-long test-ray test-gpu check format bench clean

help:
	@echo "make demo       set up, then run a pipeline over generated documents on this machine, and plan one for a cluster"
	@echo "make test       set up, then run all checks and all tests; prints the 30 slowest"
	@echo "make test-quick only the tests of the pure packages: no processes, under a minute"
	@echo "make test-long  the same with the long repeat counts and soaks"
	@echo "make test-ray   only what needs Ray (one is started for all of it)"
	@echo "make test-gpu   only what needs a real NVIDIA GPU; says why it is skipped where there is none"
	@echo "make check      formatting, lint, types and layers only"
	@echo "make format     format the code"
	@echo "make bench      the benchmarks (DATA=../shared/data)"

demo: $(VENV)/.core
	@$(BIN)/dovetail demo

test: $(VENV)/.dev redis-server
	@$(MAKE) --no-print-directory -j2 check compiled-tests
	$(BIN)/pytest -n $(TESTERS) --durations=30

# without it, the tests of the job store on Redis are skipped
redis-server:
	@command -v redis-server > /dev/null || command -v valkey-server > /dev/null || .ci/install-redis-server

# otherwise all processes of pytest compile all tests at the same time
compiled-tests: $(VENV)/.dev
	@$(BIN)/pytest --collect-only -q > $(VENV)/collected.txt || { tail -40 $(VENV)/collected.txt; exit 1; }

test-quick: $(VENV)/.dev
	DOVETAIL_TEST_QUICK=1 $(BIN)/pytest -q -n $(TESTERS) tests/test_errors.py tests/test_documents.py tests/resources tests/pipeline tests/scheduling tests/control tests/streaming

test-long: check redis-server
	DOVETAIL_TEST_LONG=1 $(BIN)/pytest -n auto -m "not bar"; tests=$$?; \
	  DOVETAIL_TEST_LONG=1 $(BIN)/pytest -n 0 -m bar && exit $$tests

test-ray: $(VENV)/.dev
	$(BIN)/pytest -m ray

test-gpu: $(VENV)/.dev
	$(BIN)/pytest -m gpu

check: $(VENV)/.dev
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

DATA ?= ../shared/data
bench: $(VENV)/.dev
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/placement.py --data $(DATA) --json benchmarks/results/placement.json
	$(BIN)/python benchmarks/jobs_placement.py --data $(DATA) --json benchmarks/results/jobs_placement.json
	$(BIN)/python benchmarks/model_affinity.py --json benchmarks/results/model_affinity.json
	$(BIN)/python benchmarks/placement_scale.py --json benchmarks/results/placement_scale.json
	$(BIN)/python benchmarks/plan_scale.py --nodes 128,512,1024,10000 --peers --data $(DATA) --json benchmarks/results/plan_scale.json
	$(BIN)/python benchmarks/plan_quality.py --data $(DATA) --json benchmarks/results/plan_quality.json
	$(BIN)/python benchmarks/replan.py --peers --data $(DATA) --json benchmarks/results/replan.json
	$(BIN)/python benchmarks/come_and_go.py --json benchmarks/results/come_and_go.json
	$(BIN)/python benchmarks/simulate.py --workers 100,1000,10000 --json benchmarks/results/simulate.json
	$(BIN)/python benchmarks/truth.py --json benchmarks/results/truth.json
	$(BIN)/python benchmarks/controller.py --workers 10,1000,10000 --json benchmarks/results/controller.json
	$(BIN)/python benchmarks/overhead.py --engine local --peers --json benchmarks/results/overhead.json
	$(BIN)/python benchmarks/overhead.py --engine ray --peers --json benchmarks/results/overhead_ray.json
	$(BIN)/python benchmarks/payload.py --json benchmarks/results/payload.json
	$(BIN)/python benchmarks/roles.py --json benchmarks/results/roles.json
	$(BIN)/python benchmarks/scaling.py --json benchmarks/results/scaling.json
	$(BIN)/python benchmarks/text.py --engine local --rows 50000 --peers --data $(DATA) --json benchmarks/results/text.json
	$(BIN)/python benchmarks/text.py --engine ray --rows 50000 --peers --data $(DATA) --json benchmarks/results/text_ray.json
	$(BIN)/python benchmarks/rows.py --rows 10000000 --json benchmarks/results/rows.json
	$(BIN)/python benchmarks/recipe.py --engine local --rows 50000 --peers --data $(DATA) --json benchmarks/results/recipe.json
	$(BIN)/python benchmarks/recipe.py --engine ray --rows 50000 --data $(DATA) --json benchmarks/results/recipe_ray.json
	$(BIN)/python benchmarks/backfill.py --rows 1000000 --peers --json benchmarks/results/backfill.json
	$(BIN)/python benchmarks/jobs.py --store redis --peers --json benchmarks/results/jobs_redis.json
	$(BIN)/python benchmarks/jobs.py --store sqlite --json benchmarks/results/jobs_sqlite.json
	$(BIN)/python benchmarks/jobs_claims.py --json benchmarks/results/jobs_claims.json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist benchmarks/results

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --editable .
	@$(BIN)/python -m compileall -q src/dovetail  # what pip does for all packages that are not editable
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@$(BIN)/python -m compileall -q src/dovetail
	@touch $@ $(VENV)/.core
