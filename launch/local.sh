#!/bin/bash
# Trains on this machine alone: checks it as a node of a job, then runs `slimrl train`, which starts its own Ray.
#
#     launch/local.sh [--sft] RECIPE [KEY=VALUE]... [--resume | --overwrite | --resume-or-start]
#
# --sft: `slimrl sft` instead. Paths are relative to the working directory.
# SLIMRL_PYTHON: the Python that has slimrl; by default that of .venv in the checkout.
# SLIMRL_GPUS: number of GPUs that must work; by default all that nvidia-smi lists, 0 without it.
# SLIMRL_MIN_FREE_GIB: memory that must be free; by default 2.
set -euo pipefail

case ${1:-} in
"" | -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
python=${SLIMRL_PYTHON:-$root/.venv/bin/python}
if [ ! -x "$(command -v "$python")" ]; then
    echo "$python: no such program. Run \`make setup\` in $root, or set SLIMRL_PYTHON." >&2
    exit 2
fi
command=train
if [ "$1" = --sft ]; then
    command=sft
    shift
fi

gpus=${SLIMRL_GPUS:-}
if [ -z "$gpus" ] && command -v nvidia-smi >/dev/null; then
    listed=$(nvidia-smi --list-gpus) || {
        echo "nvidia-smi fails: $listed" "Set SLIMRL_GPUS=0 to run without GPUs." >&2
        exit 1
    }
    gpus=$(grep -c ^GPU <<<"$listed" || true)
fi

checks=$(mktemp -d)
trap 'rm -rf "$checks"' EXIT
echo local >"$checks/canary"
"$python" -m slimrl.launch.preflight --folder "$checks" --gpus "${gpus:-0}" --min-free-gib "${SLIMRL_MIN_FREE_GIB:-2}"
rm -rf "$checks"
trap - EXIT

exec "$python" -m slimrl.cli "$command" "$@"
