#!/bin/bash
# What a machine with a GPU tells of mmfsdp, in one command of under ten minutes:
#     tests/bench/gpu.sh [FOLDER] [--total SECONDS] [--patience N] [--only PART ...]
# FOLDER (gpu_results) gets a file of JSON lines of each part, written row by row, a log, a profile, a snapshot of the
# memory, and the table that closes the output. A part that fails or takes too long does not stop the others.
# It needs no installation: PYTHON, or .venv/bin/python, or python3 with the packages that it names if they are missing
# (tests/bench/gpu_wheels.sh fetches them for a machine without internet). On a CPU everything runs, too, smaller.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # the ranks of runs find the package by it
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}  # as ranks run
export HF_HUB_OFFLINE=1  # all models are built from configurations
exec "$python" -m tests.bench.gpu.parts "$@"
