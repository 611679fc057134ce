#!/bin/bash
# A training run on this machine alone: the checks of a node, then `slimrl train`, which brings its own Ray.
#
#     launch/local.sh RECIPE [KEY=VALUE]... [--resume | --overwrite | --resume-or-start]
#
# SLIMRL_GPUS: GPUs that must be there and well; by default as many as nvidia-smi lists, or none without it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${SLIMRL_PYTHON:-.venv/bin/python}
gpus=${SLIMRL_GPUS:-$(command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus | wc -l || echo 0)}

checks=$(mktemp -d)
trap 'rm -rf "$checks"' EXIT
echo local >"$checks/canary"
"$python" -m slimrl.launch.preflight --folder "$checks" --gpus "$gpus" --min-free-gib "${SLIMRL_MIN_FREE_GIB:-2}" --first-port 10000
rm -rf "$checks"
trap - EXIT

exec "$python" -m slimrl.cli train "$@"
