"""`slimrl plan`."""

from typing import Annotated

import typer

from slimrl.cli.arguments import (
    DiskReadGbPerS,
    DiskReadTotalGbPerS,
    GpuMemoryGib,
    GpusPerNode,
    MemoryGbPerS,
    Mfu,
    NetworkGbPerS,
    NvlinkGbPerS,
    Overrides,
    PeakTflops,
    Recipe,
    ReserveGib,
    ToJson,
)
from slimrl.estimates.resync.machine import Machine


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = 8,
    gpu_memory_gib: GpuMemoryGib = 80.0,
    reserve_gib: ReserveGib = 4.0,
    host_memory_gib: Annotated[float, typer.Option(help="Memory of a node that trainer ranks may use.")] = 1800.0,
    peak_tflops: PeakTflops = 989.0,
    mfu: Mfu = 0.4,
    expert_load: Annotated[
        float, typer.Option(help="Tokens of the busiest expert-parallel rank, over the mean.")
    ] = 1.0,
    memory_gb_per_s: MemoryGbPerS = Machine.memory_gb_per_s,
    nvlink_gb_per_s: NvlinkGbPerS = Machine.nvlink_gb_per_s,
    network_gb_per_s: NetworkGbPerS = Machine.network_gb_per_s,
    disk_read_gb_per_s: DiskReadGbPerS = Machine.disk_read_gb_per_s,
    disk_read_total_gb_per_s: DiskReadTotalGbPerS = Machine.disk_read_total_gb_per_s,
    mean_tokens: Annotated[
        int | None, typer.Option(help="Mean length of a trajectory or conversation; by default the longest allowed.")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Instead list the best legal layouts of --gpus.")] = False,
    gpus: Annotated[int | None, typer.Option(help="With --suggest: trainer ranks; by default the recipe's.")] = None,
    top: Annotated[int, typer.Option(help="With --suggest: layouts to show.")] = 8,
    to_json: ToJson = False,
) -> None:
    """Estimate parameters, memory, time and resync of a recipe on a hypothetical cluster, by default of H100.

    The exit code is 1 if nothing fits.
    """
    from slimrl.observability.logs import quiet_megatron

    quiet_megatron()
    from slimrl.estimates.planner.command import run
    from slimrl.estimates.planner.hardware import Hardware

    hardware = Hardware(
        gpus_per_node=gpus_per_node,
        gpu_memory_gib=gpu_memory_gib,
        reserve_gib=reserve_gib,
        host_memory_gib=host_memory_gib,
        peak_tflops=peak_tflops,
        mfu=mfu,
        expert_load=expert_load,
        links=Machine(
            memory_gb_per_s=memory_gb_per_s,
            nvlink_gb_per_s=nvlink_gb_per_s,
            network_gb_per_s=network_gb_per_s,
            disk_read_gb_per_s=disk_read_gb_per_s,
            disk_read_total_gb_per_s=disk_read_total_gb_per_s,
        ),
    )
    fits = run(
        recipe,
        overrides or [],
        hardware,
        mean_tokens=mean_tokens,
        suggestions_wanted=suggest,
        gpus=gpus,
        top=top,
        to_json=to_json,
    )
    if not fits:
        raise typer.Exit(1)
