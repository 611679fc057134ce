#!/bin/bash
# The entrypoint of rayjob.yaml: runs `slimrl train` of this checkout on the cluster of the Ray job. It is a script
# because KubeRay hands the entrypoint to a shell of the submitting pod: of several commands, that pod would run all but
# the first.
#
#     launch/kuberay/train.sh RECIPE [KEY=VALUE]... [--resume | --overwrite | --resume-or-start]
set -euo pipefail
cd "$(dirname "$0")/../.."
# Set by Ray's job server. slimrl takes an address only from its own option.
address=${RAY_ADDRESS:?not set: this script is the entrypoint of a Ray job}
unset RAY_ADDRESS
exec python3 -m slimrl.cli train "$@" --ray-address "$address"
