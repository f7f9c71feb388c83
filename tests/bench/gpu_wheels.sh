#!/bin/bash
# Download the packages that tests/bench/gpu.sh needs, for a machine with a GPU and without internet; --help tells more:
#     tests/bench/gpu_wheels.sh [FOLDER] [--python 3.12] [--torch VERSION] [--with-torch] [--machine aarch64]
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" -m tests.bench.gpu_wheels "$@"
