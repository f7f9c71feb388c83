#!/bin/bash
# What a machine with GPUs tells of mmfsdp, in one command of under ten minutes:   tests/bench/gpu.sh [FOLDER]
# A part that fails does not stop the others. FOLDER (gpu_results) gets a log and a JSON file of each part; the tables
# close the output. On a machine without a GPU everything runs too, smaller.
set -u
cd "$(dirname "$0")/../.."
out=$(realpath -m "${1:-gpu_results}")
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
: >"$out/parts"

part() {  # name, limit in seconds, command
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "== $name: $*"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    echo "$name: exit code $? after $((SECONDS - start)) s; $*" | tee -a "$out/parts"
    tail -n 25 "$out/$name.log"
}

part machine 60 "$python" -m tests.bench.gpu machine --json "$out/machine.json"
part works 150 "$python" -m tests.bench.gpu works --json "$out/works.json"
part demo 150 "$python" -m tests.bench.gpu demo --folder "$out/runs" --json "$out/demo.json"
part step 120 "$python" -m tests.bench.gpu step --json "$out/step.json"
part vlm 90 "$python" -m tests.bench.gpu vlm --json "$out/vlm.json"
part traces 60 "$python" -m tests.bench.gpu traces --folder "$out" --json "$out/traces.json"
part quantize 60 "$python" -m tests.bench.quantize --json "$out/quantize.json"
echo "== summary"
cat "$out/parts"
! grep -qv "exit code 0" "$out/parts"
