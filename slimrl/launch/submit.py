"""`slimrl launch slurm`: the job script of a recipe that job_check.py has let pass, written and submitted."""

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.config.schema import Recipe
from slimrl.launch.reports import LaunchError
from slimrl.runtime.placement import place_on_fewest

SIGNAL_S = 300
"""How long before its time limit a job is asked for a checkpoint."""

MARGIN_S = 60
"""Of that, what is kept for the requeue itself."""

FLAGS = ("--exclusive", "--requeue")
"""Options of sbatch that every job has."""

UNDOING = {
    "no-requeue": "a job that is asked to make room has to be queued again",
    "array": "each job of the array would be the same run",
    "wrap": "it takes the place of the job script",
}
"""Options of sbatch that no job can have, and why."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What is asked of SLURM beside the recipe."""

    nodes: int
    """That the run uses; spares come on top."""
    spares: int = 0
    gpus_per_node: int = 8
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Limit in a form that SLURM takes, such as 1-12:00:00."""
    container: str | None = None
    container_mounts: str | None = None
    venv: Path | None = None
    log_dir: Path = Path("runs/slurm")
    cores_per_node: int | None = None
    """This and what follows: None for what slimrl/launch/options.py has."""
    min_free_gib: float | None = None
    object_store_gib: float | None = None
    preflight_timeout_s: float | None = None
    meeting_timeout_s: float | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each `--NAME` or `--NAME=VALUE`."""
    signal_s: int = SIGNAL_S
    sft: bool = False
    resume: bool = False
    overwrite: bool = False


def nodes_needed(recipe: Recipe, gpus_per_node: int, *, sft: bool) -> int:
    """The fewest nodes on which trainer ranks and engines have their places.

    Raises:
        ValueError: an engine does not fit on any node.
    """
    num_engines = 0 if sft else recipe.rollout.num_engines
    return place_on_fewest(recipe, gpus_per_node, num_ranks=recipe.trainer.num_ranks, num_engines=num_engines)[1]


def job_script(path: Path, overrides: Sequence[str], job: SlurmJob) -> str:
    """The batch script of a job that `check_job` has let pass."""
    lines = [f"--{name}={value}" for name, value in _directives(path, job).items() if value is not None]
    options: dict[str, object] = {
        "--spares": job.spares,
        "--gpus-per-node": job.gpus_per_node,
        "--log-dir": job.log_dir,
        "--grace-s": job.signal_s - MARGIN_S,
        "--venv": job.venv,
        "--container": job.container,
        "--container-mounts": job.container_mounts,
        "--cores-per-node": job.cores_per_node,
        "--min-free-gib": job.min_free_gib,
        "--object-store-gib": job.object_store_gib,
        "--preflight-timeout-s": job.preflight_timeout_s,
        "--meeting-timeout-s": job.meeting_timeout_s,
    }
    arguments = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    flags = {"--sft": job.sft, "--resume": job.resume, "--overwrite": job.overwrite}
    arguments += [name for name, given in flags.items() if given]
    arguments += [str(path), *overrides]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_quoted(line)}" for line in (*lines, *FLAGS, *job.sbatch)),
            "set -euo pipefail",
            'cd "${SLIMRL_ROOT:-$SLURM_SUBMIT_DIR}"',
            f'exec "${{SLIMRL_HOST_PYTHON:-python3}}" -m slimrl.launch.job {shlex.join(arguments)}',
            "",
        ]
    )


def _directives(path: Path, job: SlurmJob) -> dict[str, object]:
    """Options of sbatch that have a value, None where it is left to SLURM."""
    return {
        "job-name": f"slimrl-{path.stem}",
        "nodes": job.nodes + job.spares,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{job.signal_s}",
        "mem": 0,
        "open-mode": "append",
        "output": job.log_dir / "%j.log",
    }


def check_sbatch(path: Path, job: SlurmJob) -> None:
    """Refuse options of sbatch that are not written in full, those that the script has already, and `UNDOING`.

    sbatch takes a long option by any beginning of its name that is clear, so beginnings are refused as well.

    Raises:
        ValueError: it is so.
    """
    own = {*_directives(path, job), *(flag.removeprefix("--") for flag in FLAGS)}
    for option in job.sbatch:
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=.+)?", option)
        if found is None:
            raise ValueError(f"--sbatch {option!r}: write it in full, --NAME or --NAME=VALUE.")
        begun = sorted(name for name in (*own, *UNDOING) if name.startswith(found.group(1)))
        if begun and begun[0] in UNDOING:
            raise ValueError(f"--sbatch {option!r}: --{begun[0]} cannot be given: {UNDOING[begun[0]]}.")
        if begun:
            raise ValueError(
                f"--sbatch {option!r}: the job script sets --{begun[0]} itself; see slimrl launch slurm --help."
            )


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return name + equals + quote(value)


def quote(value: str) -> str:
    """As sbatch reads it from a #SBATCH line: spaces and # end a value, within double quotes and after \\ they do not.

    Raises:
        ValueError: it has more than one line.
    """
    if "\n" in value:
        raise ValueError(f"{value!r}: more than one line, which a job script cannot hold.")
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    return '"' + re.sub(r'(["\\#])', r"\\\1", value) + '"'


def submit(script: str, name: str, log_dir: Path) -> tuple[Path, str]:
    """Write a job's script into `log_dir`, under a name with the time, and submit it.

    Returns:
        The script's file, and what sbatch said.

    Raises:
        LaunchError: sbatch refused it.
    """
    # SLURM drops a job silently whose log it cannot open.
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    file.write_text(script)
    try:
        answer = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch: {error}. The script is {file}.") from error
    if answer.returncode:
        raise LaunchError(f"sbatch: {answer.stderr.strip()} The script is {file}.")
    return file, answer.stdout.strip()
