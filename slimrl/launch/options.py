"""The options of a job, as the batch script passes them on. Standard library alone, see slurm.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """To the parser of slimrl.launch.job."""
    add = parser.add_argument
    add("--spares", type=int, default=0, help="nodes of the allocation that may turn out bad")
    add("--gpus-per-node", type=int, default=8, help="0 for nodes without")
    add(
        "--cores-per-node",
        type=int,
        help="that Ray counts on; by default those there are. Without GPUs each is a place",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--venv", type=Path, default=Path(".venv"), help="virtual environment, seen by all nodes")
    where.add_argument("--container", help="image for pyxis/enroot, with slimrl's dependencies for its python3")
    add("--container-mounts", default="", help="more of SRC:DST,...; the working directory is mounted in any case")
    add("--log-dir", type=Path, default=Path("runs/slurm"), help="on the shared file system")
    add("--min-free-gib", type=float, default=8.0, help="memory that a node must have free")
    add("--object-store-gib", type=float, default=16.0, help="shared memory of Ray on each node")
    add("--preflight-timeout-s", type=float, default=300.0)
    add("--meeting-timeout-s", type=float, default=180.0, help="of the all-reduce")
    add("--grace-s", type=float, default=240.0, help="from the signal to the requeue, less than sbatch --signal says")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="the first attempt too continues a run")
    start.add_argument("--overwrite", action="store_true", help="the first attempt removes a run of this name")
    add("--sft", action="store_true", help="slimrl sft instead of slimrl train")
    add("--command", action="store_true", help="what follows is no recipe but a whole command")
    add("rest", nargs=argparse.REMAINDER, metavar="RECIPE [KEY=VALUE]...")


def node_python(options: argparse.Namespace) -> str:
    """The interpreter that has slimrl's dependencies, on the nodes or in the container."""
    return "python3" if options.container else str(options.venv.absolute() / "bin" / "python")


def container_options(options: argparse.Namespace) -> list[str]:
    """Options of srun for pyxis; none without a container."""
    if not options.container:
        return []
    here = str(Path.cwd())
    # Ray and the command meet in its temporary folder, each in a container of its own.
    mounts = ",".join(filter(None, [f"{here}:{here}", "/tmp:/tmp", options.container_mounts]))
    return [
        f"--container-image={options.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={here}",
        "--no-container-mount-home",
    ]


def train_command(options: argparse.Namespace, attempt: int) -> list[str]:
    """What runs on the head node: `slimrl train` of the recipe, which a later attempt continues."""
    if options.command:
        return list(options.rest)
    command = [node_python(options), "-m", "slimrl.cli", "sft" if options.sft else "train", *options.rest]
    if attempt:
        return [*command, "--resume-or-start"]
    return [*command, *(["--resume"] if options.resume else []), *(["--overwrite"] if options.overwrite else [])]
