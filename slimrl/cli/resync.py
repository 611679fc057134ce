"""`slimrl resync estimate` and `bench`."""

from typing import Annotated

import typer

from slimrl.cli.arguments import Overrides, Recipe
from slimrl.cli.exit_codes import exit_codes
from slimrl.resync.estimate.machine import Machine


def estimate(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(help="Trainer ranks and engines fill one node after the other.")] = 8,
    block_fp8: Annotated[bool, typer.Option("--block-fp8", help="Engines hold the model in block FP8.")] = False,
    memory_gb_per_s: Annotated[
        float, typer.Option(help="Of a GPU's memory, reading and writing together.")
    ] = Machine.memory_gb_per_s,
    nvlink_gb_per_s: Annotated[
        float, typer.Option(help="Of a GPU to those of its node, each way.")
    ] = Machine.nvlink_gb_per_s,
    network_gb_per_s: Annotated[
        float, typer.Option(help="Of a GPU's network adapter, each way.")
    ] = Machine.network_gb_per_s,
    pcie_gb_per_s: Annotated[float, typer.Option(help="Between a GPU and its host, each way.")] = Machine.pcie_gb_per_s,
    disk_write_gb_per_s: Annotated[
        float, typer.Option(help="Shared file system, one node writing.")
    ] = Machine.disk_write_gb_per_s,
    disk_read_gb_per_s: Annotated[
        float, typer.Option(help="Shared file system, one node reading.")
    ] = Machine.disk_read_gb_per_s,
    disk_read_total_gb_per_s: Annotated[
        float, typer.Option(help="The same, all nodes together.")
    ] = Machine.disk_read_total_gb_per_s,
    hop_us: Annotated[float, typer.Option(help="What each node adds to a broadcast along a chain.")] = Machine.hop_us,
    gather_us: Annotated[
        float, typer.Option(help="A trainer rank's time for one piece, besides the bytes.")
    ] = Machine.gather_us,
    load_us: Annotated[
        float, typer.Option(help="An engine rank's time for one tensor, besides the bytes.")
    ] = Machine.load_us,
    bucket_ms: Annotated[float, typer.Option(help="The engines' call for one bucket.")] = Machine.bucket_ms,
    to_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bytes by link and seconds of a resync on a cluster that need not be there; by default with nodes of 8 H100."""
    with exit_codes():
        from slimrl.observability.logs import quiet_megatron

        quiet_megatron()
        from slimrl.runtime.resync_estimate import estimate_resync

        machine = Machine(
            memory_gb_per_s=memory_gb_per_s,
            nvlink_gb_per_s=nvlink_gb_per_s,
            network_gb_per_s=network_gb_per_s,
            pcie_gb_per_s=pcie_gb_per_s,
            disk_write_gb_per_s=disk_write_gb_per_s,
            disk_read_gb_per_s=disk_read_gb_per_s,
            disk_read_total_gb_per_s=disk_read_total_gb_per_s,
            hop_us=hop_us,
            gather_us=gather_us,
            load_us=load_us,
            bucket_ms=bucket_ms,
        )
        estimate_resync(
            recipe,
            overrides or [],
            gpus_per_node=gpus_per_node,
            machine=machine,
            block_fp8=block_fp8,
            to_json=to_json,
        )


def bench(
    recipe: Recipe,
    overrides: Overrides = None,
    gigabytes: Annotated[float, typer.Option(help="About the size of the model, in 1e9 bytes.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured resyncs, after a first one.")] = 3,
    family: Annotated[str | None, typer.Option(help="Of the model; without it that of model.path.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure real resyncs on this machine: the recipe's trainer and engines, a random model of a stated size."""
    with exit_codes():
        from slimrl.runtime.resync_bench import bench_resync

        bench_resync(recipe, overrides or [], family=family, gigabytes=gigabytes, repeats=repeats, to_json=json_output)
