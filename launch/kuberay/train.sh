#!/bin/bash
# What the RayJob of rayjob.yaml runs, on the head node of its cluster: `slimrl train` of the checkout that this file is
# in, on that cluster. KubeRay hands an entrypoint to a shell of the pod that submits it, so an entrypoint of several
# commands would run there from its second command on; one that is a script runs whole on the cluster.
#
#     launch/kuberay/train.sh RECIPE [KEY=VALUE]... [--resume | --overwrite | --resume-or-start]
set -euo pipefail
cd "$(dirname "$0")/../.."
# Ray's job server sets it for the jobs that it starts; slimrl takes the address only where it is told to.
address=${RAY_ADDRESS:?not set: this script is the entrypoint of a Ray job}
unset RAY_ADDRESS
exec python3 -m slimrl.cli train "$@" --ray-address "$address"
