PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/pip --quiet --disable-pip-version-check
PROTOS = proto/kvrelay/proto/v1/*.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: install demo test test-full soak compose-test compose-smoke check format format-check lint types proto stubs-check wheel-check clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "torch>=2.11"
	$(PIP) install -c constraints.txt -e ".[dev]"
	touch $@

# A cluster of real processes on this machine answers a long prompt; ends by itself.
demo: install
	$(BIN)/python -m kvrelay.cli.demo

# Clusters of many processes follow each other on one worker (tests/conftest.py), which begins with them; the others take
# all files of tests that start none.
WORKERS ?= 2
DEFAULT_TESTS = -m "not full and not gpu and not compose" --durations=25
test: install
	$(PYTEST) $(DEFAULT_TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/cluster tests/faults tests/unit tests/contract tests/compose

test-full: install
	KVRELAY_COLD_TESTS=1 $(PYTEST) -m "not gpu and not compose"
	$(MAKE) --no-print-directory compose-test

# The compose file's cpu profile in real containers; needs root, docker-compose and a Docker engine. Without a registry
# of images set KVRELAY_BASE_IMAGE and KVRELAY_REDIS_IMAGE to local ones (tests/compose/base_image.sh makes one for both).
compose-test: install
	$(PYTEST) -vv -m compose tests/compose --durations=0

# One answer out of containers, for CI.
compose-smoke: install
	$(PYTEST) -vv -m compose tests/compose -k "answered"

# Random traffic under random faults, every answer compared: MINUTES=5 by default; SEED=N plays a schedule again,
# NO_PULLS=1 lets no prefill node fetch cached blocks; HOST_TIER=1 gives them small pools with host memory behind them;
# OUT=FILE keeps the result with machine, versions and date.
MINUTES ?= 5
soak: install
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults.lab.soak --minutes $(MINUTES) \
		$(if $(SEED),--seed $(SEED)) $(if $(NO_PULLS),--no-pulls) $(if $(HOST_TIER),--host-tier) $(if $(OUT),--out $(OUT))

check: format-check lint types test

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

proto: install
	$(PROTOC) --python_out=proto --grpc_python_out=proto --mypy_out=proto --mypy_grpc_out=proto $(PROTOS)

# The committed stubs are what protoc makes of the committed protos.
stubs-check: install
	rm -rf build/stubs && mkdir -p build/stubs
	$(PROTOC) --python_out=build/stubs --grpc_python_out=build/stubs --mypy_out=build/stubs \
		--mypy_grpc_out=build/stubs $(PROTOS)
	diff -r -x '*.proto' -x __pycache__ proto/kvrelay/proto/v1 build/stubs/kvrelay/proto/v1

# The wheel, in a clean environment and away from this tree, serves a request.
wheel-check: install
	BIN=$(abspath $(BIN)) PYTHON=$(PYTHON) bash tests/wheel_check.sh

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .run
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
