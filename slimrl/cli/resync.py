"""`slimrl resync estimate` and `bench`."""

from typing import Annotated

import typer

from slimrl.base.imports import imports_uncollected
from slimrl.cli.arguments import (
    DiskReadGbPerS,
    DiskReadTotalGbPerS,
    GpusPerNode,
    NetworkGbPerS,
    NvlinkGbPerS,
    Overrides,
    Recipe,
    ToJson,
)
from slimrl.estimates.resync.machine import Machine


def estimate(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus_per_node: GpusPerNode = 8,
    block_fp8: Annotated[bool, typer.Option("--block-fp8", help="Engines hold the model in block FP8.")] = False,
    memory_gb_per_s: Annotated[
        float, typer.Option(help="Bandwidth of a GPU's memory, reads and writes together.")
    ] = Machine.memory_gb_per_s,
    nvlink_gb_per_s: NvlinkGbPerS = Machine.nvlink_gb_per_s,
    network_gb_per_s: NetworkGbPerS = Machine.network_gb_per_s,
    pcie_gb_per_s: Annotated[
        float, typer.Option(help="Bandwidth between a GPU and its host, each way.")
    ] = Machine.pcie_gb_per_s,
    disk_write_gb_per_s: Annotated[
        float, typer.Option(help="Bandwidth of the shared file system with one node writing.")
    ] = Machine.disk_write_gb_per_s,
    disk_read_gb_per_s: DiskReadGbPerS = Machine.disk_read_gb_per_s,
    disk_read_total_gb_per_s: DiskReadTotalGbPerS = Machine.disk_read_total_gb_per_s,
    to_json: ToJson = False,
) -> None:
    """Estimate bytes by link and seconds of a resync on a hypothetical cluster, by default nodes of 8 H100."""
    from slimrl.observability.logs import quiet_megatron

    quiet_megatron()
    from slimrl.estimates.resync.command import estimate_resync

    machine = Machine(
        memory_gb_per_s=memory_gb_per_s,
        nvlink_gb_per_s=nvlink_gb_per_s,
        network_gb_per_s=network_gb_per_s,
        pcie_gb_per_s=pcie_gb_per_s,
        disk_write_gb_per_s=disk_write_gb_per_s,
        disk_read_gb_per_s=disk_read_gb_per_s,
        disk_read_total_gb_per_s=disk_read_total_gb_per_s,
    )
    estimate_resync(
        recipe, overrides or [], gpus_per_node=gpus_per_node, machine=machine, block_fp8=block_fp8, to_json=to_json
    )


def bench(
    recipe: Recipe,
    overrides: Overrides = None,
    gigabytes: Annotated[float, typer.Option(help="About the size of the model, in 1e9 bytes.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured resyncs after the first, which is not counted.")] = 3,
    family: Annotated[str | None, typer.Option(help="Model family; by default that of model.path.")] = None,
    to_json: ToJson = False,
) -> None:
    """Measure real resyncs on this machine with the recipe's trainer and engines and a random model."""
    with imports_uncollected():
        from slimrl.runtime.resync_tools.resync_bench import bench_resync

    bench_resync(recipe, overrides or [], family=family, gigabytes=gigabytes, repeats=repeats, to_json=to_json)
