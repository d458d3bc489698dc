PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: install demo test test-full check format lint types proto stubs-check wheel-check clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch>=2.11"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

proto: install
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_out=proto --mypy_grpc_out=proto proto/kvrelay/proto/v1/*.proto

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
