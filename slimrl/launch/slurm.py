"""A job's requests to SLURM: its allocation, steps on its nodes, the requeue.

Standard library alone and Python 3.9: this runs on the batch host, outside of the container.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.launch.options import container_options, node_python
from slimrl.launch.reports import LaunchError

PREEMPTED = 75
"""Exit code of `slimrl train` after SIGUSR1: its steps are saved, and the job should be requeued. EX_TEMPFAIL of
sysexits.h."""

CONTROL_TIMEOUT_S = 60.0

_NAME = re.compile(r"[\w.-]*(?:\[[\d,-]+\][\w.-]*)+|[\w.-]+")
"""A word that can be a node's name, or a node list in SLURM's short form, such as gpu-[001-003,007]."""


@dataclass(frozen=True)
class Allocation:
    """The SLURM job whose batch script this process is."""

    job_id: int
    attempt: int
    """Number of requeues so far"""
    nodes: list[str]
    hosts: dict[str, str]
    """Host name by which others reach each node, by the node's name"""


def this_allocation() -> Allocation:
    """Read this job's allocation from the environment and scontrol.

    Raises:
        LaunchError: this is not a SLURM job, or scontrol does not answer.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise LaunchError("SLURM_JOB_ID is not set: start this with sbatch.")
    nodelist = os.environ["SLURM_JOB_NODELIST"]
    nodes = _ask("scontrol", "show", "hostnames", nodelist).split()
    return Allocation(
        job_id=int(os.environ["SLURM_JOB_ID"]),
        attempt=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=nodes,
        hosts=_hosts(nodes, nodelist),
    )


def requeue(job_id: int) -> None:
    """Requeue the job, which ends its current attempt.

    Only a running job: `scontrol requeue` would revive one that its user has cancelled.

    Raises:
        LaunchError: the job is not running, or SLURM refuses.
    """
    state = _field(_ask("scontrol", "--oneliner", "show", "job", str(job_id)), "JobState")
    if state != "RUNNING":
        raise LaunchError(f"the job is {state}, so it is not requeued")
    _ask("scontrol", "requeue", str(job_id))


def srun_command(
    options: argparse.Namespace,
    nodes: Sequence[str],
    log: Path | None,
    module: str,
    arguments: Sequence[str],
    *,
    stop_together: bool = True,
) -> list[str]:
    """Run `module` once on each node, with all cores, memory and GPUs, in parallel with other steps of the job.

    Args:
        log: file name with %N for the node; None to print through srun.
        stop_together: a process that fails ends the others.
    """
    count = len(nodes)
    return [
        "srun",
        f"--nodelist={','.join(nodes)}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--overlap",
        "--cpu-bind=none",
        "--mem=0",
        f"--kill-on-bad-exit={int(stop_together)}",
        "--wait=0",
        *([f"--output={log}"] if log else []),
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *container_options(options),
        *(node_python(options), "-m", module, *arguments),
    ]


def named_nodes(text: str, nodes: Sequence[str]) -> list[str]:
    """The nodes that a message of srun names, as whole words or in brackets."""
    words = {word.rstrip(".") for word in _NAME.findall(text)}
    return [node for node in nodes if any(_names(word, node) for word in words)]


def _names(word: str, node: str) -> bool:
    # Odd parts are the contents of brackets.
    parts = re.split(r"\[([\d,-]+)\]", word)
    pattern = "".join(r"(\d+)" if index % 2 else re.escape(part) for index, part in enumerate(parts))
    found = re.fullmatch(pattern, node)
    return found is not None and all(map(_holds, parts[1::2], found.groups()))


def _holds(ranges: str, number: str) -> bool:
    """Whether ranges contain a number with its zeros: `08-10,12` contains 08, 09, 10 and 12, not 8."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if first.isdigit() and last.isdigit() and int(first) <= int(number) <= int(last):
            return number == f"{int(number):0{len(first)}d}"
    return False


def _hosts(nodes: Sequence[str], nodelist: str) -> dict[str, str]:
    lines = _ask("scontrol", "--oneliner", "show", "node", nodelist).splitlines()
    hosts = {_field(line, "NodeName"): _field(line, "NodeHostName") for line in lines if line.strip()}
    if missing := [node for node in nodes if node not in hosts]:
        raise LaunchError(f"scontrol show node does not list {', '.join(missing)}")
    return hosts


def _field(line: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if found is None:
        raise LaunchError(f"no {name} in the answer of scontrol: {line[:200]}")
    return found.group(1)


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=CONTROL_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command)}: {error}") from error
    if answer.returncode:
        raise LaunchError(f"{' '.join(command)}: {answer.stderr.strip() or answer.returncode}")
    return answer.stdout
