# make demo: see it work.  make test: check everything that is quick.  See CONTRIBUTING.md.

PYTHONS := python3.11 python3
TORCH := torch==2.13.0
SLURM_PACKAGES := slurmctld slurmd slurmdbd slurm-client munge mariadb-server iproute2 lmod
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup lint test test-all gpu-check peers demo wheel slurm-packages

help:
	@echo "make setup     virtual environment in .venv"
	@echo "make demo      train on this machine, lose a rank, see the run go on"
	@echo "make test      lint and all tests but the slow ones"
	@echo "make test-all  lint and all tests"
	@echo "make gpu-check the trainer on one GPU, in a few minutes"
	@echo "make peers     other trainers beside ours; installs them in .venv-peers"
	@echo "make lint      ruff, mypy, shellcheck, import rules"
	@echo "make wheel     the wheel, in dist/"

setup: $(READY)

# Torch is pinned exactly: given a range, pip would fetch gigabytes of CUDA on a machine without a GPU.
$(READY): pyproject.toml constraints.txt
	@python=$$(for python in $(PYTHONS); do \
		$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
			&& command -v $$python && break; \
	done); \
	if [ -z "$$python" ]; then \
		echo "make setup: no Python 3.11 with venv among: $(PYTHONS); install it (Debian: apt-get install python3-venv)" >&2; \
		exit 1; \
	fi; \
	[ -x $(BIN)/python ] || $$python -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files -co --exclude-standard -z -- .ci/run '*.sh' 'sbatch_templates/*.sbatch' | xargs -0r $(BIN)/shellcheck
	$(BIN)/lint-imports

test: setup slurm-packages lint
	$(BIN)/pytest -m 'not slow'

test-all: setup slurm-packages lint
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev,frameworks]'
	$(BIN)/pytest

# Any Python with torch for CUDA and hpcrun's other dependencies: make gpu-check PYTHON=python3
PYTHON := $(BIN)/python

gpu-check:
	$(PYTHON) -m tests.gpu.check

PEERS := .venv-peers

peers: setup
	[ -x $(PEERS)/bin/python ] || $(BIN)/python -m venv $(PEERS)
	DS_BUILD_OPS=0 $(PEERS)/bin/pip install --quiet --disable-pip-version-check $(TORCH) hatchling editables setuptools wheel
	DS_BUILD_OPS=0 $(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation \
		$(TORCH) ai2-olmo-core==3.0.0 deepspeed==0.19.8 -e '.[train]'
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m tests.peers.compare

slurm-packages:
	@missing=$$(for package in $(SLURM_PACKAGES); do \
		dpkg-query -W -f '$${db:Status-Status}' $$package 2>/dev/null | grep -qx installed || echo $$package; \
	done); \
	if [ -z "$$missing" ]; then exit 0; \
	elif ! command -v apt-get >/dev/null; then why="this is not Debian"; \
	elif [ "$$(id -u)" != 0 ]; then why="installing them takes root"; \
	elif ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
		apt-get install -q -y --no-install-recommends $$missing; } >.venv/apt.log 2>&1; then why="apt-get failed, see .venv/apt.log"; \
	else exit 0; fi; \
	echo "make: tests on a real Slurm are left out: packages" $$missing "are missing and $$why"

demo: setup
	$(BIN)/hpcrun demo

wheel: setup
	$(BIN)/python -m build --wheel --no-isolation
