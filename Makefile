# Two commands for a fresh Debian or Ubuntu machine: `make demo` and `make test`.
# Both install what they need: Debian packages (as root or with sudo), a .venv, Python packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEBIAN := g++ cmake libfaiss-dev libeigen3-dev python3-venv
# for the test of the report, which is skipped where there is no browser
BROWSER := chromium chromium-driver
SOURCES := pyproject.toml $(shell find clients -type f) $(shell find gapa_onnx cli runtime -name '*.py' -o -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.css' -o -name 'CMakeLists.txt' -o -name '*.cmake' -o -name '*.map')
NATIVE := $(shell find runtime tests/fuzz/native -name '*.cc' -o -name '*.h' -o -name '*.inc')

.PHONY: demo test nightly soak fuzz lint format house bench figures pins wheels check-wheels reproducible clean

demo: $(VENV)/.installed
	$(BIN)/python benchmarks/demo.py

# `make test TESTS="tests/variance/test_rules.py -k Tanh"` runs a few
test: $(VENV)/.installed $(VENV)/.browser
	$(BIN)/pytest $(TESTS)

# also what takes long: the whole zoo, other onnxruntime releases, more random graphs
nightly: $(VENV)/.installed $(VENV)/.browser
	$(BIN)/pytest -m "nightly or not nightly" $(TESTS)

# 8 threads open, use and close sessions for so long, on about so many cores: the same bits, and no more memory
MINUTES ?= 60
CORES ?= 1
soak: $(VENV)/.installed
	$(BIN)/python tests/soak/soak.py --minutes $(MINUTES) --cores $(CORES)

# `make fuzz HOURS=8`: all fuzzers in turn, going on where they ended; docs/fuzzing.md
fuzz: $(VENV)/.installed
	cd tests && ../$(BIN)/python -m fuzz.run --hours $(or $(HOURS),1)

# formats, style and types; the limits on rooms and functions are a test (tests/test_house.py)
lint: $(VENV)/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/python tools/check_types.py

# what `lint` would only say, done
format: $(VENV)/.installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $(NATIVE)

# docs/figures/house.svg: the rooms and who imports whom
house: $(VENV)/.installed
	$(BIN)/python tools/draw_house.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/calibration_memory.py

# the pictures of two moons and of a curve with a gap
figures: $(VENV)/.installed
	$(BIN)/python benchmarks/paper/toys.py

# a release: the wheels for every platform in dist/, checks of them, and whether two builds are equal; docs/releasing.md
RELEASE := .venv-release
wheels: $(RELEASE)/.installed
	$(RELEASE)/bin/python tools/release.py

check-wheels: $(RELEASE)/.installed
	$(RELEASE)/bin/python tools/check_wheels.py

reproducible: $(RELEASE)/.installed
	$(RELEASE)/bin/python tools/reproducible.py

$(RELEASE)/.installed: tools/release.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q -r tools/release.txt
	@touch $@

# Debian packages that are not there yet
define install
	@missing=""; for package in $(1); do dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ]; then run=""; else run="sudo"; fi; \
	  $$run apt-get update -q && DEBIAN_FRONTEND=noninteractive $$run apt-get install -y -q --no-install-recommends $$missing; \
	fi
endef

$(VENV)/.system:
	$(call install,$(DEBIAN))
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.browser: $(VENV)/.system
	$(call install,$(BROWSER))
	@touch $@

# what checks and builds is pinned by hashes; the rest is as new as a user would get it
$(VENV)/.installed: $(VENV)/.system $(SOURCES) .ci/tools.txt
	$(BIN)/pip install -q --require-hashes -r .ci/tools.txt
	$(BIN)/pip install -q ".[test,lint]"
	@touch $@

# .ci/tools.txt: the newest releases of what .ci/tools.in names, for every platform, with their hashes
pins: $(VENV)/.system
	$(BIN)/pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --upgrade --generate-hashes --no-header --no-annotate \
	  .ci/tools.in -o .ci/tools.txt

clean:
	rm -rf $(VENV) $(RELEASE) build dist demo-output
