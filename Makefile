# Two commands are all a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all durations faults lint bench docs clean

# torch goes in first and pinned, so that nothing after it pulls another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	@touch $(READY)

# The main job, small: five contenders against the plain residual on text, three of them on a task. A second run finds
# it done.
DEMO := --tokens 120000 --context 64 --batch 16 --lr 3e-3
demo: $(READY)
	$(BIN)/twoaxis compare --out runs/demo/text --data stdlib --seeds 6 $(DEMO) --stream denseformer \
	  --stream attention_residuals:block_size=4 --stream deep_delta --mixer short_swa:window=16 --mixer short_conv
	$(BIN)/twoaxis compare --out runs/demo/recall --task recall --seeds 3 $(DEMO) \
	  --stream deep_delta --mixer short_swa:window=16 --mixer short_conv

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/pytest -n 2 -m "not slow"

test-all: lint
	$(BIN)/pytest -n 2

# Prints the slowest test files, in CPU seconds, and writes the table by which `make test` orders them.
durations: $(READY)
	$(BIN)/pytest -n 2 -m "not slow" --record-durations

# Every fault of tests/faults/faults.toml planted in a copy of the tree: its tests must fail. ONLY="id id" takes some.
faults: $(READY)
	$(BIN)/python -m tests.faults.run $(if $(ONLY),--only $(ONLY))

# All figures of docs/performance.md, measured and written: about a quarter of an hour of a quiet machine.
bench: $(READY)
	$(BIN)/python -m benchmarks --write-docs

# The parts of docs/ that the library writes: the map of methods, what commands print, figures.
docs: $(READY)
	$(BIN)/python -m docs._make

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
