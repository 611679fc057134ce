"""`slimrl simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from slimrl.cli.arguments import (
    GpuMemoryGib,
    GpusPerNode,
    MemoryGbPerS,
    Mfu,
    NetworkGbPerS,
    NvlinkGbPerS,
    Overrides,
    PeakTflops,
    Recipe,
)
from slimrl.estimates.resync.machine import Machine

DISTRIBUTION = "a number, lognormal:MEDIAN:SIGMA or pareto:LEAST:ALPHA"


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    tool: Annotated[str | None, typer.Option(help=f"Seconds of a tool's answer: {DISTRIBUTION}; by default 0.")] = None,
    turn_tokens: Annotated[
        str | None,
        typer.Option(help=f"Tokens that the model samples in a turn: {DISTRIBUTION}; by default the most allowed."),
    ] = None,
    turns: Annotated[
        str | None, typer.Option(help=f"Turns of a trajectory: {DISTRIBUTION}; by default the most allowed.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a trajectory that are not sampled; by default what the sampled ones leave."),
    ] = None,
    decode_efficiency: Annotated[
        float, typer.Option(help="Fraction of the memory bandwidth and of the peak that decoding reaches.")
    ] = 0.6,
    gpus: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Simulate the recipe's split scaled to so many GPUs.")
    ] = None,
    scale_batch: Annotated[bool, typer.Option("--scale-batch", help="With --gpus: scale the prompts too.")] = False,
    suggest: Annotated[
        int | None, typer.Option(metavar="N", help="List the best splits of N GPUs in the recipe's mode.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Replay the recorded times of this run folder.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure, after some that warm up.")] = 40,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON file to write.")] = None,
    gpus_per_node: GpusPerNode = 8,
    gpu_memory_gib: GpuMemoryGib = 80.0,
    peak_tflops: PeakTflops = 989.0,
    mfu: Mfu = 0.4,
    memory_gb_per_s: MemoryGbPerS = Machine.memory_gb_per_s,
    nvlink_gb_per_s: NvlinkGbPerS = Machine.nvlink_gb_per_s,
    network_gb_per_s: NetworkGbPerS = Machine.network_gb_per_s,
) -> None:
    """Compare sync, one_step_off and async without a GPU or a model: throughput, who is idle, staleness."""
    from slimrl.observability.logs import quiet_megatron

    quiet_megatron()
    from slimrl.estimates.planner.hardware import Hardware
    from slimrl.estimates.simulator.command import Question, run

    hardware = Hardware(
        gpus_per_node=gpus_per_node,
        gpu_memory_gib=gpu_memory_gib,
        peak_tflops=peak_tflops,
        mfu=mfu,
        links=Machine(
            memory_gb_per_s=memory_gb_per_s, nvlink_gb_per_s=nvlink_gb_per_s, network_gb_per_s=network_gb_per_s
        ),
    )
    question = Question(
        turns=turns,
        turn_tokens=turn_tokens,
        tool=tool,
        prompt_tokens=prompt_tokens,
        decode_efficiency=decode_efficiency,
        gpus=gpus,
        scale_batch=scale_batch,
        suggest=suggest,
        trace=trace,
        steps=steps,
        seed=seed,
    )
    run(recipe, overrides or [], hardware, question, json_file=json_file)
