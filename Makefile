# make train   trains the quickstart's adapter; RECIPE=my.toml trains yours
# make test    runs every part of the tests that need no GPU once; make test-all, all of them
# make check   checks formatting, lint and types
# make gpu-check   checks this checkout on a machine with a GPU
# make bench   runs the benchmarks that this machine can run
# make docs    builds the documentation's site in build/site
# make clean   removes the environment and caches, but no runs

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 12))
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
EXTRAS ?= dev
RECIPE ?= scripts/configs/quickstart.toml
# nvidia-smi lists GPUs only where their driver answers.
GPU := $(shell nvidia-smi --list-gpus 2>/dev/null | head -n 1)
PACKAGE := .$(if $(GPU),[cuda13])
# Python compiles what a command imports; pip would compile everything, which takes as long as installing.
PIP := .venv/bin/pip install --quiet --disable-pip-version-check --no-compile

.PHONY: train test test-all check gpu-check bench docs clean

train: .venv/installed
	.venv/bin/python scripts/train.py --config $(RECIPE)

PYTEST := PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.pytest_cache/xla .venv/bin/pytest -n 2 --dist=worksteal

test: .venv/dev
	$(PYTEST) -m "not gpu and not slow" --kills 1

test-all: .venv/dev
	$(PYTEST) -m "not gpu"

check: .venv/dev
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy

gpu-check: .venv/dev
	.venv/bin/python benchmarks/gpu_check.py

bench: .venv/installed
ifdef GPU
	.venv/bin/python benchmarks/sft_step.py --rows qwen3-0.6b --engines ours --scratch runs/benchmarks
	.venv/bin/python benchmarks/attention.py
	.venv/bin/python benchmarks/packed_metadata.py
	.venv/bin/python benchmarks/norm_rope.py
	.venv/bin/python benchmarks/dequantize.py
	.venv/bin/python benchmarks/optimizer.py
	.venv/bin/python benchmarks/moe_routing.py
	.venv/bin/python benchmarks/offload.py
	.venv/bin/python benchmarks/finetune.py --shapes qwen3-0.6b --scratch runs/benchmarks
else
	@echo "nvidia-smi lists no GPU: the main job on a tiny model is all that can be measured here."
	.venv/bin/python benchmarks/finetune.py --shapes tiny --chats 300 --steps 10 --scratch runs/benchmarks
endif

docs: .venv/installed
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

.venv/installed: pyproject.toml
	@'$(PYTHON)' -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "error: jaxglue needs Python 3.12 or newer, and $(or $(PYTHON),python3) is not." \
			"Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	'$(PYTHON)' -m venv .venv
	@echo "installing packages into .venv, 1 GB: a minute from the cache of pip, longer where they are downloaded"
	$(PIP) --editable '$(PACKAGE)'
	@touch $@

.venv/dev: .venv/installed
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@
