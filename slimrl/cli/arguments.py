"""Arguments and options of several commands."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def _check_address(address: str | None) -> str | None:
    """Refuse anything but HOST:PORT, `auto` included: Ray might find somebody else's cluster."""
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            raise typer.BadParameter(f"{address}: give HOST:PORT of the head node.")
    return address


Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")]
ForCommand = Annotated[
    Literal["train", "sft", "eval", "rollout"] | None,
    typer.Option(
        "--command", help="Command to read the recipe for; by default sft if it sets sft.max_tokens, else train."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")]
ResumeOrStart = Annotated[
    bool,
    typer.Option("--resume-or-start", help="Continue the run if it has a checkpoint, else start it; for queued jobs."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove an existing run of this name first.")]
Job = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Queued job of this attempt. A run that the job began is continued; "
        "--resume and --overwrite apply to runs of other jobs.",
    ),
]
CheckpointLog = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File that gets a line with the step at which the run continues (`none` for a new one), then a line with "
        "the step of each checkpoint.",
    ),
]
GpusPerNode = Annotated[
    int, typer.Option(help="GPUs of a node; trainer ranks and engines fill one node after the other.")
]
NvlinkGbPerS = Annotated[float, typer.Option(help="Bandwidth of a GPU to its node's other GPUs, each way.")]
DiskReadGbPerS = Annotated[float, typer.Option(help="Bandwidth of the shared file system with one node reading.")]
DiskReadTotalGbPerS = Annotated[float, typer.Option(help="Bandwidth of the shared file system with all nodes reading.")]
NetworkGbPerS = Annotated[float, typer.Option(help="Bandwidth of a GPU's network adapter, each way.")]
GpuMemoryGib = Annotated[float, typer.Option(help="Memory of one GPU.")]
ReserveGib = Annotated[
    float, typer.Option(help="Memory of a GPU that tensors cannot use: CUDA contexts, communication.")
]
PeakTflops = Annotated[float, typer.Option(help="Peak of one GPU in dense bf16.")]
Mfu = Annotated[float, typer.Option(help="Fraction of the peak that a computation reaches.")]
MemoryGbPerS = Annotated[float, typer.Option(help="Read bandwidth of a GPU's memory.")]
ToJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="SLIMRL_RAY_ADDRESS",
        callback=_check_address,
        help="Head node of the Ray cluster to run on; by default the run starts its own Ray on this machine.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(metavar="STEPS", help="Record what every process does in these steps, such as 3, 3-5 or 2,7."),
]
ProfileTorch = Annotated[
    bool, typer.Option("--profile-torch", help="With --profile: also record what torch does in the trainer.")
]
