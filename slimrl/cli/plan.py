"""`slimrl plan`."""

from typing import Annotated

import typer

from slimrl.cli.arguments import Overrides, Recipe
from slimrl.cli.exit_codes import exit_codes
from slimrl.resync.estimate.machine import Machine


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(help="Trainer ranks and engines fill one node after the other.")] = 8,
    gpu_memory_gib: Annotated[float, typer.Option(help="Of one GPU.")] = 80.0,
    reserve_gib: Annotated[float, typer.Option(help="Of it, not for tensors: CUDA contexts, communication.")] = 4.0,
    host_memory_gib: Annotated[float, typer.Option(help="Of a node, for what trainer ranks keep there.")] = 1800.0,
    peak_tflops: Annotated[float, typer.Option(help="Of one GPU, dense bf16.")] = 989.0,
    mfu: Annotated[float, typer.Option(help="Share of the peak that is reached while computing.")] = 0.4,
    expert_load: Annotated[float, typer.Option(help="Tokens of the busiest expert-parallel rank over the mean.")] = 1.0,
    memory_gb_per_s: Annotated[float, typer.Option(help="Of a GPU's memory, read.")] = Machine.memory_gb_per_s,
    nvlink_gb_per_s: Annotated[float, typer.Option(help="Of a GPU, each way.")] = Machine.nvlink_gb_per_s,
    network_gb_per_s: Annotated[float, typer.Option(help="Of a GPU's adapter, each way.")] = Machine.network_gb_per_s,
    mean_tokens: Annotated[
        int | None, typer.Option(help="Mean length of a trajectory or conversation; without it the longest allowed.")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank legal layouts of --gpus instead.")] = False,
    gpus: Annotated[int | None, typer.Option(help="With --suggest: trainer ranks; without it the recipe's.")] = None,
    top: Annotated[int, typer.Option(help="With --suggest: layouts to show.")] = 8,
    to_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters, memory, time and resync of a recipe on a cluster that need not be there; by default of H100.

    It ends with exit code 1 where nothing fits.
    """
    with exit_codes():
        from slimrl.observability.logs import quiet_megatron

        quiet_megatron()
        from slimrl.planner.command import run
        from slimrl.planner.hardware import Hardware

        hardware = Hardware(
            gpus_per_node=gpus_per_node,
            gpu_memory_gib=gpu_memory_gib,
            reserve_gib=reserve_gib,
            host_memory_gib=host_memory_gib,
            peak_tflops=peak_tflops,
            mfu=mfu,
            expert_load=expert_load,
            links=Machine(
                memory_gb_per_s=memory_gb_per_s, nvlink_gb_per_s=nvlink_gb_per_s, network_gb_per_s=network_gb_per_s
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
