"""`slimrl resync estimate`: what a resync of a recipe costs on a cluster that need not be there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from slimrl.config.load import read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema import Recipe
from slimrl.data.protocols import EnginePlace
from slimrl.models.family import family_of
from slimrl.models.fp8 import SCALE_SUFFIX, BlockFp8
from slimrl.models.planned_recipe import read_planned
from slimrl.models.weight_map import WeightMap
from slimrl.observability.terminal import plain_console
from slimrl.resync.buckets import too_small
from slimrl.resync.estimate.estimate import ESTIMATED, NOT_ESTIMATED, Estimate, as_json, estimate
from slimrl.resync.estimate.machine import Machine
from slimrl.resync.plan import plan_resync
from slimrl.resync.transform import quantize_transform
from slimrl.runtime.placement import place_on_fewest
from slimrl.trainer.source_layout import source_layout


@dataclass(frozen=True, kw_only=True)
class Cluster:
    nodes: tuple[str, ...]
    """Of each trainer rank"""
    engines: tuple[EnginePlace, ...]
    gpus: int
    """Of trainer and engines together"""
    num_nodes: int


def estimate_resync(
    path: Path, overrides: Sequence[str], *, gpus_per_node: int, machine: Machine, block_fp8: bool, to_json: bool
) -> None:
    """Print bytes by kind of link and seconds by stage.

    Args:
        block_fp8: take the engines' checkpoint to be in block FP8 even if its config.json does not say so.

    Raises:
        ValueError: the recipe is refused, or its model is not known here.
    """
    read, _ = read_recipe(path, overrides, "resync estimate")
    if read is not None and read.recipe.resync.transport not in ESTIMATED:
        # Before the recipe is asked for what this transport needs in a run.
        raise RecipeError([read.problem("resync.transport", NOT_ESTIMATED)])
    planned = read_planned(path, overrides, "resync estimate")
    recipe, hf_config, model = planned.loaded.recipe, planned.hf_config, planned.model
    if gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node {gpus_per_node}: must be at least 1")
    if block_fp8 and BlockFp8.of_config(hf_config) is None:
        hf_config = {**hf_config, "quantization_config": BlockFp8().as_config()}
    weight_map = family_of(hf_config).weight_map(hf_config)
    transform = quantize_transform(hf_config, weight_map, fp8_engines=True)
    cluster = planned_cluster(recipe, gpus_per_node)
    transport = recipe.resync.transport
    tensors = source_layout(hf_config, recipe.trainer)
    if reason := too_small([tensor.spec for tensor in tensors], recipe.resync.bucket_bytes, transform):
        raise RecipeError([planned.loaded.problem("resync.bucket_bytes", reason)])
    plan = plan_resync(
        tensors,
        cluster.nodes,
        cluster.engines,
        transport=transport,
        bucket_bytes=recipe.resync.bucket_bytes,
        transform=transform,
    )
    result = estimate(plan, cluster.engines, machine, transport=transport, replicated=replicated_names(weight_map))
    facts = {
        "model": model,
        "transport": transport.value,
        "trainer_ranks": recipe.trainer.num_ranks,
        "engines": recipe.rollout.num_engines,
        "ranks_per_engine": recipe.rollout.engine_tensor,
        "nodes": cluster.num_nodes,
        "gpus_per_node": gpus_per_node,
        "bucket_bytes": recipe.resync.bucket_bytes,
        "block_fp8": BlockFp8.of_config(hf_config) is not None,
    }
    if to_json:
        print(json.dumps({**facts, **as_json(result, machine)}, indent=2))
    else:
        _print(facts, result)


def planned_cluster(recipe: Recipe, gpus_per_node: int, *, with_engines: bool = True) -> Cluster:
    """The nodes of a run that has as few as are enough, and what goes where on them.

    Raises:
        ValueError: see `place_on_fewest`.
    """
    placement, num_nodes = place_on_fewest(
        recipe,
        gpus_per_node,
        num_ranks=recipe.trainer.num_ranks,
        num_engines=recipe.rollout.num_engines if with_engines else 0,
    )
    engines = tuple(
        EnginePlace(
            name=f"engine-{index}",
            nodes=(slots[0].node.name,),
            num_ranks=len(slots),
            expert=recipe.rollout.engine_expert,
        )
        for index, slots in enumerate(placement.engines)
    )
    return Cluster(
        nodes=tuple(slot.node.name for slot in placement.ranks),
        engines=engines,
        gpus=len(placement.slots),
        num_nodes=num_nodes,
    )


def replicated_names(weight_map: WeightMap) -> frozenset[str]:
    """Tensors that no tensor parallelism cuts, and the scales of those that are quantised."""
    names = [name for entry in weight_map.entries if entry.rule.shard is None for t in entry.hf for name in t.names]
    return frozenset(names + [name + SCALE_SUFFIX for name in names])


def _print(facts: dict[str, Any], result: Estimate) -> None:
    console = plain_console()
    console.print(f"model: {facts['model']}")
    fp8 = ", block FP8" if facts["block_fp8"] else ""
    console.print(
        f"trainer ranks: {facts['trainer_ranks']}, engines: {facts['engines']} with "
        f"{_count(facts['ranks_per_engine'], 'rank')}, nodes: {facts['nodes']} with "
        f"{_count(facts['gpus_per_node'], 'GPU')}, resync.transport: {facts['transport']}{fp8}"
    )
    sent = "" if result.sent_bytes == result.gathered_bytes else f", sent as {_size(result.sent_bytes)}"
    console.print(
        f"{_size(result.gathered_bytes)}{sent}, in {_count(result.tensors, 'tensor')} and "
        f"{_count(result.buckets, 'bucket')} of at most {_size(facts['bucket_bytes'])}"
    )
    console.print()
    console.print(_table(("link", "bytes"), [(name, _size(n)) for name, n in result.link_bytes.items()]))
    console.print(_table(("stage", "time"), [(name, _duration(s)) for name, s in result.stage_seconds.items()]))
    console.print(f"estimated: {_duration(result.seconds)} from the first bucket to the last; stages overlap")


def _table(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(titles[0])
    table.add_column(titles[1], justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(nbytes: int) -> str:
    """In the unit that leaves at least one digit before the point."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return _count(nbytes, "byte")


def _duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.2f} {name}"
    return f"{seconds * 1e6:,.2f} us"
