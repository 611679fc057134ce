"""`slimrl resync estimate`: what a resync of a recipe costs on a cluster that need not be there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slimrl.config.schema import Recipe, TransportName
from slimrl.data.protocols import EnginePlace
from slimrl.models.family import family_of
from slimrl.models.fp8 import SCALE_SUFFIX, BlockFp8
from slimrl.models.planned_recipe import read_planned
from slimrl.models.weight_map import WeightMap
from slimrl.resync.estimate.estimate import Estimate, as_json, estimate
from slimrl.resync.estimate.machine import GB, Machine
from slimrl.resync.plan import plan_resync
from slimrl.resync.transform import quantize_transform
from slimrl.trainer.source_layout import source_layout


@dataclass(frozen=True, kw_only=True)
class Cluster:
    nodes: tuple[str, ...]
    """Of each trainer rank"""
    engines: tuple[EnginePlace, ...]


def estimate_resync(
    path: Path, overrides: Sequence[str], *, gpus_per_node: int, machine: Machine, block_fp8: bool, to_json: bool
) -> None:
    """Print bytes by kind of link and seconds by stage.

    Args:
        block_fp8: take the engines' checkpoint to be in block FP8 even if its config.json does not say so.

    Raises:
        ValueError: the recipe is refused, or its model is not known here.
    """
    planned = read_planned(path, overrides, "resync estimate")
    recipe, hf_config, model = planned.loaded.recipe, planned.hf_config, planned.model
    if gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node {gpus_per_node}: must be at least 1")
    if block_fp8 and BlockFp8.of_config(hf_config) is None:
        hf_config = {**hf_config, "quantization_config": BlockFp8().as_config()}
    weight_map = family_of(hf_config).weight_map(hf_config)
    transform = quantize_transform(hf_config, weight_map, fp8_engines=True)
    cluster = place(recipe, gpus_per_node)
    transport = recipe.resync.transport
    plan = plan_resync(
        source_layout(hf_config, recipe.trainer),
        cluster.nodes,
        cluster.engines,
        transport=transport,
        bucket_bytes=recipe.resync.bucket_bytes,
        transform=transform,
    )
    result = estimate(plan, cluster.engines, machine, transport=transport, replicated=replicated_names(weight_map))
    if to_json:
        print(json.dumps({"model": model, "transport": transport.value, **as_json(result, machine)}, indent=2))
    else:
        _print(recipe, model, cluster, result)


def place(recipe: Recipe, gpus_per_node: int) -> Cluster:
    """Trainer ranks fill one node after the other. Engines share their GPUs with `ipc`, and else come behind them."""
    ranks, size = recipe.trainer.num_ranks, recipe.rollout.engine_tensor
    first = 0 if recipe.resync.transport is TransportName.ipc else -(-ranks // gpus_per_node) * gpus_per_node
    engines = []
    for index in range(recipe.rollout.num_engines):
        gpus = range(first + index * size, first + (index + 1) * size)
        engines.append(
            EnginePlace(
                name=f"engine-{index}",
                nodes=tuple(dict.fromkeys(f"node{gpu // gpus_per_node}" for gpu in gpus)),
                num_ranks=size,
                expert=recipe.rollout.engine_expert,
            )
        )
    return Cluster(nodes=tuple(f"node{rank // gpus_per_node}" for rank in range(ranks)), engines=tuple(engines))


def replicated_names(weight_map: WeightMap) -> frozenset[str]:
    """Tensors that no tensor parallelism cuts, and the scales of those that are quantised."""
    names = [name for entry in weight_map.entries if entry.rule.shard is None for t in entry.hf for name in t.names]
    return frozenset(names + [name + SCALE_SUFFIX for name in names])


def _print(recipe: Recipe, model: str, cluster: Cluster, result: Estimate) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    rollout, resync = recipe.rollout, recipe.resync
    nodes = {*cluster.nodes, *(node for engine in cluster.engines for node in engine.nodes)}
    console.print(f"model: {model}")
    console.print(
        f"trainer ranks: {len(cluster.nodes)}, engines: {rollout.num_engines} with {rollout.engine_tensor} ranks, "
        f"nodes: {len(nodes)}, resync.transport: {resync.transport.value}"
    )
    sent = "" if result.sent_bytes == result.gathered_bytes else f", sent as {_gigabytes(result.sent_bytes)}"
    console.print(
        f"{_gigabytes(result.gathered_bytes)}{sent}, in {result.tensors:,} tensors and {result.buckets:,} buckets of "
        f"at most {_gigabytes(resync.bucket_bytes)}"
    )
    console.print()
    console.print(_table(("link", "bytes"), [(name, _gigabytes(n)) for name, n in result.link_bytes.items()]))
    console.print(_table(("stage", "seconds"), [(name, f"{s:,.2f}") for name, s in result.stage_seconds.items()]))
    console.print(f"estimated: {result.seconds:,.1f} s from the first bucket to the last; stages overlap")


def _table(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(titles[0])
    table.add_column(titles[1], justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / GB:,.2f} GB"
