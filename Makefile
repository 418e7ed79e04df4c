# `make demo` and `make test` do all set-up themselves; the stamp lets the next call start at once.
# On a machine with CUDA: make EXTRA=gpu demo

# OpenMP threads that spin while they wait take the cores from the other processes of a test or a demo.
export OMP_WAIT_POLICY := PASSIVE

EXTRA := cpu
ROUNDS := 200
ENGINES := 1
NODES := 1
DATABASE := sqlite
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(EXTRA)
PROTOS := $(wildcard tinker_server/api_schemas/*.proto)

.PHONY: help setup demo test test-fast test-slow test-all chaos conformance sdk-matrix acceptance acceptance-quick vision-rl check docs pictures models hardware proto wheel image serve clean

help:
	@echo "make demo    train and sample a small vision-language model on this machine; ARGS=--keep leaves its server"
	@echo "make test    lint, types, then all tests that need no GPU and are not slow"
	@echo "make test-fast   in a minute, the unit tests that need neither torch nor seconds; ARGS=\"-k NAME\""
	@echo "make test-all   the same, then the slow tests"
	@echo "make chaos   ROUNDS=200 processes are killed while clients work; nothing may be lost, doubled or wrong"
	@echo "make conformance   the protocol's checklist, item by item, with the real SDK"
	@echo "make sdk-matrix   nine versions of the SDK, 0.8 to 0.38, must see the same numbers"
	@echo "make acceptance   recipes of the cookbook, unmodified, each by what it wrote"
	@echo "make acceptance-quick   the shortest of these, each kind once, and the image RL examples"
	@echo "make check   lint and types only"
	@echo "make serve   start the server: make serve ARGS=\"--model NAME=DIR_OR_HUB_ID\""
	@echo "make docs    build the documentation into build/site; a broken link is an error"
	@echo "make pictures   write docs/pictures: a real run in the dashboard"
	@echo "make models   write docs/models.md from what the server says of each kind"
	@echo "make hardware   write docs/hardware.md from the memory plan"
	@echo "make wheel   build the wheel into dist"
	@echo "make image   build the Docker image, with version and commit in its tag; EXTRA=gpu for CUDA"
	@echo "make proto   compile the protobuf schema again"
	@echo "make setup   only install; make clean removes $(VENV) and all caches"

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/install.sh .ci/torchvision_shim.py
	@.ci/install.sh $(VENV) $(EXTRA),dev
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/caltech10_demo.py $(ARGS)

# Two workers, and what each starts, on two cores: more threads only wait for one another.
test test-fast test-slow: export OMP_NUM_THREADS := 1
# In the order of tests/workers.py: by the number of their tests, the few that take minutes would come last, and one
# worker would wait for the other.
TWO_WORKERS := -n 2 --dist loadscope --no-loadscope-reorder --ignore tests/gpu --ignore tests/acceptance tests

test: check
	$(BIN)/pytest -m "not gpu and not slow" $(TWO_WORKERS)

# What tests/unit/backends tests imports torch, 5 s of a core in each worker.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -p tests.no_torch -m "not heavy and not slow" -n 2 --dist loadscope \
		--ignore tests/unit/backends tests/unit $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest --timeout 900 -m "slow and not gpu" $(TWO_WORKERS)

test-all: test test-slow

chaos: $(STAMP)
	$(BIN)/pytest tests/chaos --timeout 0 -s -m slow -k rounds --rounds $(ROUNDS) --engines $(ENGINES) --nodes $(NODES) \
		--database $(DATABASE)

conformance: $(STAMP)
	$(BIN)/python -m pytest -p tests.conformance.report tests/conformance

sdk-matrix: $(STAMP)
	$(BIN)/python -m tests.sdk_matrix.run $(ARGS)

# --caltech101 FOLDER (in ARGS) takes all its classes in place of the demo's ten.
acceptance: vision-rl
	$(BIN)/python -m pytest --timeout 1800 tests/acceptance $(ARGS)

acceptance-quick: vision-rl
	$(BIN)/python -m pytest --timeout 600 -m quick tests/acceptance $(ARGS)

# What PYTEST_ADDOPTS names may not be in the cookbook's environment.
vision-rl: $(STAMP) .cookbook/.installed
	PYTEST_ADDOPTS= .cookbook/bin/python -m pytest -q -c examples/vision_rl/pytest.ini examples/vision_rl

.cookbook/.installed: tests/acceptance/install.sh tests/acceptance/requirements.txt
	tests/acceptance/install.sh .cookbook
	@touch $@

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python .ci/prose.py
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A run with the real trainer and engine, in a browser.
pictures: $(STAMP)
	$(BIN)/pytest tests/browser/test_real_engine.py --pictures docs/pictures

hardware: $(STAMP)
	$(BIN)/python -m tests.hardware_page

models: $(STAMP)
	$(BIN)/python -m tests.models_page

proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. $(PROTOS)

wheel:
	python3 -m pip wheel --no-deps --wheel-dir dist .

image:
	eval "$$(python3 tinker_server/release.py)" && docker build --build-arg EXTRA=$(EXTRA) --build-arg VERSION="$$VERSION" \
		--build-arg COMMIT="$$COMMIT" --tag "tinker-server:$$TAG$(if $(filter cpu,$(EXTRA)),-cpu)" .

serve: $(STAMP)
	$(BIN)/tinker-server serve $(ARGS)

clean:
	rm -rf $(VENV) .sdk-matrix .cookbook .mypy_cache .ruff_cache .pytest_cache build *.egg-info
