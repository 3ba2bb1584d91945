# Two commands are all a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all test-transformers test-torchtitan durations faults lint bench docs clean

# torch goes in first and pinned, so that nothing after it pulls another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	@touch $(READY)

# The main job, small: five contenders against the plain residual on text, two of them on a task. Curves are of few
# held-out rows, which takes a twelfth of the time away; verdicts are of 512. A second run finds it done.
DEMO := --preset pico --tokenizer bytes --tokens 160000 --lr 6e-3 --eval-examples 16
demo: $(READY)
	$(BIN)/twoaxis compare --out runs/demo/text --data stdlib --seeds 6 $(DEMO) --stream denseformer \
	  --stream attention_residuals:block_size=4 --stream deep_delta --mixer short_swa:window=16 --mixer short_conv
	$(BIN)/twoaxis compare --out runs/demo/recall --task recall --seeds 3 $(DEMO) --context 64 --batch 16 \
	  --stream deep_delta --mixer short_conv
	@echo "The pages: runs/demo/text/report/report.html and runs/demo/recall/report/report.html. Next: docs/tutorial/index.md,"
	@echo "or a comparison of your own: $(BIN)/twoaxis compare --help"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/pytest -n 2 -m "not slow"

test-all: lint
	$(BIN)/pytest -n 2

# Streams in models of transformers with the oldest version that the package asks for, installed beside the others.
OLDEST := 5.16.0
OLD    := $(VENV)/transformers-$(OLDEST)
test-transformers: $(READY)
	test -d $(OLD) || $(BIN)/pip install --quiet --disable-pip-version-check --target $(OLD) transformers==$(OLDEST)
	PYTHONPATH=$(abspath $(OLD)) $(BIN)/pytest -n 2 -m "not slow" tests/model tests/pretrained

# Our decoder in torchtitan's trainer, in an environment of its own: what torchtitan pins does not go with the rest.
TITAN := .venv-torchtitan
$(TITAN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torchtitan==0.3.0 triton \
	  pytest pytest-xdist hypothesis -e .
	@touch $@

test-torchtitan: $(TITAN)/.ready
	$(TITAN)/bin/pytest -rP tests/torchtitan

# Prints the slowest test files, in CPU seconds, and writes the table by which `make test` orders them.
durations: $(READY)
	$(BIN)/pytest -n 2 -m "not slow" --record-durations

# Every fault of tests/faults/faults.toml planted in a copy of the tree: its tests must fail. ONLY="id id" takes some.
faults: $(READY)
	$(BIN)/python -m tests.faults.run $(if $(ONLY),--only $(ONLY))

# All figures of docs/results/performance.md, measured and written: about a quarter of an hour of a quiet machine.
bench: $(READY)
	$(BIN)/python -m benchmarks --write-docs

# The parts of docs/ that the library writes (the map of methods, what commands print, figures), and the site in site/.
docs: $(READY)
	$(BIN)/python -m docs._make
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(TITAN) site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
