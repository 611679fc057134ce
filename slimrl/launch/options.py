"""The options of slimrl.launch.job, which the batch script passes on. Standard library alone, see slurm.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from slimrl.launch.reports import LaunchError


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--spares", type=int, default=0, help="number of nodes of the allocation that may be bad")
    spare_nodes = "trainer.spare_nodes of the recipe; with them the job outlives a lost node, if sbatch has --no-kill"
    add("--spare-nodes", type=int, default=0, help=spare_nodes)
    add("--gpus-per-node", type=int, default=8, help="0 for nodes without GPUs")
    add("--cores-per-node", type=int, help="for Ray; by default all. Without GPUs each core is a slot")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--venv", type=Path, default=Path(".venv"), help="virtual environment on the shared file system")
    where.add_argument("--container", help="image for pyxis/enroot, whose python3 has slimrl's dependencies")
    add("--container-mounts", default="", help="SRC:DST,... in addition to the working and log folders")
    add("--log-dir", type=Path, default=Path("runs/slurm"), help="on the shared file system")
    add("--min-free-gib", type=float, default=8.0, help="memory that must be free on a node")
    add("--object-store-gib", type=float, default=16.0, help="Ray's shared memory on each node")
    add("--preflight-timeout-s", type=float, default=300.0, help="deadline of a node's own checks")
    add("--allreduce-timeout-s", type=float, default=180.0, help="deadline of the all-reduce between nodes")
    add("--grace-s", type=float, default=240.0, help="from the signal to the requeue; less than in sbatch --signal")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue a run that another job started")
    start.add_argument("--overwrite", action="store_true", help="remove a run that another job started")
    add("--sft", action="store_true", help="slimrl sft instead of slimrl train")
    add("--command", action="store_true", help="run the rest as a command instead of a recipe")
    add("rest", nargs=argparse.REMAINDER, metavar="RECIPE [KEY=VALUE]...")


def check_rest(options: argparse.Namespace) -> None:
    """Refuse early what the head node would refuse late.

    A recipe outside of the working directory may exist only in the container; the head node checks it.

    Raises:
        LaunchError: there is no command or recipe, or the recipe's file is missing.
    """
    if not options.rest:
        raise LaunchError("no command is given" if options.command else "no recipe is given")
    if options.command:
        return
    recipe, here = Path(options.rest[0]), Path.cwd()
    seen_here = not options.container or here in Path(os.path.abspath(recipe)).parents
    if seen_here and not recipe.is_file():
        raise LaunchError(f"recipe {recipe}: no such file in {here}. It comes after the job's options.")


def node_python(options: argparse.Namespace) -> str:
    """The interpreter that has slimrl's dependencies, on the nodes or in the container."""
    return "python3" if options.container else str(options.venv.absolute() / "bin" / "python")


def container_options(options: argparse.Namespace) -> list[str]:
    """Options of srun for pyxis; none without a container."""
    if not options.container:
        return []
    here = Path.cwd()
    # Ray and the command run in containers of their own and share Ray's temporary folder.
    folders = [here, Path("/tmp")]
    log_dir = options.log_dir.absolute()
    if here not in (log_dir, *log_dir.parents):
        folders.append(log_dir)
    mounts = ",".join([*(f"{folder}:{folder}" for folder in folders), *filter(None, [options.container_mounts])])
    return [
        f"--container-image={options.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={here}",
        "--no-container-mount-home",
    ]


def train_command(options: argparse.Namespace, job_id: int, checkpoint_log: Path) -> list[str]:
    """The command on the head node: the same in all attempts of a job, except for `checkpoint_log`."""
    if options.command:
        return list(options.rest)
    return [
        *(node_python(options), "-m", "slimrl.cli", "sft" if options.sft else "train", *options.rest),
        *(f"--job={job_id}", f"--checkpoint-log={checkpoint_log}"),
        *(["--resume"] if options.resume else []),
        *(["--overwrite"] if options.overwrite else []),
    ]
