#!/bin/sh
# The host comparison: a 4 GB model into system memory on 2 cores, page cache warm and cold, against
# safetensors' pread and mmap, each timed to the end of one pass over every byte.
#
#   PYTHON=.venv/bin/python bench/host/run.sh [MODEL_FOLDER] [RESULTS_FOLDER]
#
# The interpreter needs forebay, torch, numpy and safetensors. GB, VISITS and CORES change the
# sizes; EXTRA goes to load.py (say EXTRA="--site forebay=DIR"). Root drops the page cache most surely.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
model=${1:-$here/../data/host-${GB:-4}}
results=${2:-$here/../results}
load=$here/../peers/load.py
pin=
if command -v taskset >/dev/null 2>&1; then pin="taskset -c ${CORES:-0,1}"; fi

"$python" "$load" --make "$model" --gb "${GB:-4}" --shards 4 --tensors llm
# shellcheck disable=SC2086  # pin and EXTRA are words
$pin "$python" "$load" "$model" --device cpu --cache warm --preset host --title host-warm \
    --visits "${VISITS:-5}" --out "$results/host-warm.json" ${EXTRA:-}
# shellcheck disable=SC2086
$pin "$python" "$load" "$model" --device cpu --cache cold --preset host-cold --title host-cold \
    --phase first --visits "${VISITS:-5}" --out "$results/host-cold.json" ${EXTRA:-}
"$python" "$here/../peers/targets.py" "$results/host-warm.json" "$results/host-cold.json"
