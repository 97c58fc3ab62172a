# Set-up, tests, demo and checks on a bare Debian or Ubuntu machine. Everything lands in .venv, build
# and out. Targets may be called again at any time: only what changed is done again.
#
#   make demo    set-up, then train a 3-D U-Net domain-parallel on a brain scan; DEMO_ARGS=--full
#   make test    set-up, then every test
#   make build   the set-up alone: .venv/bin/python can import shardfield
#   make lint    formatters, linters, layer and size checks       make tidy   clang-tidy, slow
#   make bench   benchmarks                                       make clean  forget the set-up
#
# TORCH="torch==2.12.0" builds against another release; PYTHON=python3.12 picks the interpreter.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
BUILD := build/release
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
export SHARDFIELD_BUILD_TESTS = ON
export SHARDFIELD_BUILD_EXAMPLES = ON
export SHARDFIELD_BUILD_BENCHMARKS = ON

files_under = $(shell find $(1) -type f -not -name '*.pyc' 2>/dev/null)
sources = $(call files_under,CMakeLists.txt cmake shardfield bindings python pyproject.toml)
program_sources = $(call files_under,tests/cpp tests/fuzz tests/consumer examples/cpp benchmarks)

.PHONY: build test test-cpp test-python demo lint lint-tools tidy format bench clean
build: $(STAMPS)/installed

$(STAMPS)/system: tools/install_system_packages.sh
	@bash tools/install_system_packages.sh "$(PYTHON)"
	@mkdir -p $(STAMPS) && touch $@

# An own constraint file, so that no later package can exchange torch.
$(STAMPS)/venv: $(STAMPS)/system requirements/build.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q "pip>=24"
	$(PIP) install -q "$(TORCH)" -r requirements/build.txt
	@$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" \
	  > $(VENV)/constraints.txt
	@touch $@

$(STAMPS)/test-packages: $(STAMPS)/venv requirements/test.txt requirements/test-no-deps.txt
	$(PIP) install -q -c $(VENV)/constraints.txt -r requirements/test.txt
	$(PIP) install -q --no-deps -r requirements/test-no-deps.txt
	@touch $@

$(STAMPS)/demo-packages: $(STAMPS)/venv requirements/demo.txt requirements/demo-no-deps.txt
	$(PIP) install -q -c $(VENV)/constraints.txt -r requirements/demo.txt
	$(PIP) install -q --no-deps -r requirements/demo-no-deps.txt
	@touch $@

$(STAMPS)/lint-packages: $(STAMPS)/system requirements/lint.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -r requirements/lint.txt
	@touch $@

# One build tree serves the wheel and, built only where they are asked for, the C++ tests, examples
# and benchmarks.
$(STAMPS)/installed: $(STAMPS)/venv $(sources)
	@echo "Building Shardfield (log: build/install.log); the first time takes minutes"
	@mkdir -p build
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install -v --no-build-isolation --no-deps \
	  --force-reinstall -C build-dir=$(BUILD) -C build.tool-args=-j$(JOBS) -C cmake.args=-GNinja \
	  -C "build.targets=_shardfield;shardfield_vtk;shardfield_hdf5" . \
	  2>&1 | tee build/install.log | grep --line-buffered -E '^ *\[[0-9]+/|[Ee]rror|FAILED' \
	  || { tail -n 60 build/install.log; exit 1; }
	@$(BIN)/python -c "import shardfield"
	@touch $@

build_programs = PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(BUILD) -j$(JOBS)
$(STAMPS)/programs: $(STAMPS)/installed $(program_sources)
	$(build_programs)
	@touch $@

test: test-cpp test-python

test-cpp: $(STAMPS)/programs
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

test-python: $(STAMPS)/programs $(STAMPS)/test-packages $(STAMPS)/demo-packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/python

demo: $(STAMPS)/installed $(STAMPS)/demo-packages
	$(build_programs) --target brain_unet
	$(BIN)/python examples/python/brain_unet.py --cpp $(BUILD)/examples/cpp/brain_unet $(DEMO_ARGS)

cpp_files = $(shell git ls-files -co --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh')
cmake_files = $(shell git ls-files -co --exclude-standard 'CMakeLists.txt' '**/CMakeLists.txt' '*.cmake')

lint-tools: $(STAMPS)/lint-packages

lint: $(STAMPS)/lint-packages
	@python3 tools/check_layers.py
	@python3 tools/check_sizes.py
	@$(BIN)/clang-format --dry-run -Werror $(cpp_files) && echo "clang-format: clean"
	@$(BIN)/gersemi --check $(cmake_files) && echo "gersemi: clean"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# Files to check: TIDY_FILES="shardfield/ops/conv.cpp ..." or every file of the core.
TIDY_FILES ?= $(shell git ls-files 'shardfield/*.cpp')
tidy: $(STAMPS)/lint-packages $(STAMPS)/installed
	$(BIN)/python tools/run_clang_tidy.py --build $(BUILD) --jobs $(JOBS) $(TIDY_FILES)

format: $(STAMPS)/lint-packages
	@$(BIN)/clang-format -i $(cpp_files)
	@$(BIN)/gersemi -i $(cmake_files)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMPS)/programs
	@for script in $(wildcard benchmarks/*_bench.py benchmarks/*/*_bench.py); do \
	  echo "== $$script"; $(BIN)/python $$script; done
	@for program in $$(find $(BUILD)/benchmarks -name '*_bench' -type f -perm -u+x); do \
	  echo "== $$program"; $$program; done

clean:
	rm -rf $(VENV) build
