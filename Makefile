# Two commands are all a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all lint bench clean

# torch goes in first and pinned, so that nothing after it pulls another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/twoaxis verify

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/pytest -n 2 -m "not slow"

test-all: lint
	$(BIN)/pytest -n 2

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
