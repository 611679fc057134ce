"""What a job asks SLURM: its own allocation, steps on its nodes, and to be queued again.

Standard library alone, and no newer Python than 3.9: this runs on the batch host, outside of the container.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.launch.reports import LaunchError

PREEMPTED = 75
"""Exit code of `slimrl train` after SIGUSR1: the steps that it made are saved, and it is to be queued again."""

CONTROL_TIMEOUT_S = 60.0

_NAME = re.compile(r"[\w.-]*(?:\[[\d,-]+\][\w.-]*)+|[\w.-]+")
"""A word that can be a node's name, or several in SLURM's short form, such as gpu-[001-003,007]."""


@dataclass(frozen=True)
class Allocation:
    """The job that this process is the batch script of."""

    job_id: int
    attempt: int
    """0 for the first start, then one more with every requeue."""
    nodes: list[str]
    hosts: dict[str, str]
    """Host name by which each node is reached."""


def this_allocation() -> Allocation:
    """Read from the environment, and asked of scontrol.

    Raises:
        LaunchError: this is no SLURM job, or scontrol does not answer.
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
    """Queue the job again, which ends it here.

    Only a running job: `scontrol requeue` would bring back one that its user has cancelled.

    Raises:
        LaunchError: it cannot be queued again.
    """
    state = _field(_ask("scontrol", "--oneliner", "show", "job", str(job_id)), "JobState")
    if state != "RUNNING":
        raise LaunchError(f"the job is {state}, so it is not queued again")
    _ask("scontrol", "requeue", str(job_id))


def srun_command(
    nodes: Sequence[str],
    log: Path | None,
    command: Sequence[str],
    *,
    container: Sequence[str],
    gpus: int,
    stop_together: bool = True,
) -> list[str]:
    """One process of `command` on each node, with all of its cores and memory, beside other steps of the job.

    Args:
        log: one file per node, with %N in its name; None for srun's own output.
        container: options of pyxis, or none.
        gpus: of each node; steps share them.
        stop_together: one that fails ends the others.
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
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *container,
        *command,
    ]


def named_nodes(text: str, nodes: Sequence[str]) -> list[str]:
    """Those of the nodes that a message of srun names, by whole words and within brackets."""
    words = {word.rstrip(".") for word in _NAME.findall(text)}
    return [node for node in nodes if any(_names(word, node) for word in words)]


def _names(word: str, node: str) -> bool:
    # Text and the insides of brackets take turns.
    parts = re.split(r"\[([\d,-]+)\]", word)
    pattern = "".join(r"(\d+)" if index % 2 else re.escape(part) for index, part in enumerate(parts))
    found = re.fullmatch(pattern, node)
    return found is not None and all(map(_holds, parts[1::2], found.groups()))


def _holds(ranges: str, number: str) -> bool:
    """Whether `08-10,12` stands for this number: for 08, 09, 10 and 12, not for 8."""
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
        raise LaunchError(f"scontrol show node says nothing of {', '.join(missing)}")
    return hosts


def _field(line: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if found is None:
        raise LaunchError(f"scontrol answers without {name}: {line[:200]}")
    return found.group(1)


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=CONTROL_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command)}: {error}") from error
    if answer.returncode:
        raise LaunchError(f"{' '.join(command)}: {answer.stderr.strip() or answer.returncode}")
    return answer.stdout
