"""`slimrl resync estimate`: bytes and seconds of a recipe's resync on a cluster, from a plan alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slimrl.base.collecting import uncollected
from slimrl.config.load import read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.speculative_rules import sends_drafts
from slimrl.data.model_weights import EnginePlace
from slimrl.estimates.resync.estimate import ESTIMATED, NOT_ESTIMATED, BucketEstimate, Estimate, as_json
from slimrl.estimates.resync.machine import Machine
from slimrl.estimates.resync.peer_estimate import PeerEstimate, Spread
from slimrl.estimates.resync.version_estimate import estimate_version
from slimrl.models.family import family_of
from slimrl.models.offline_recipe import read_offline
from slimrl.models.weight_map import WeightMap
from slimrl.observability.terminal import plain_console
from slimrl.observability.units import counted, show_bytes
from slimrl.quantization.fp8 import SCALE_SUFFIX, BlockFp8
from slimrl.resync.bucket_size import too_few_bytes
from slimrl.resync.transform import quantize_transform
from slimrl.runtime.cluster.placement import place_on_fewest
from slimrl.trainer.layout.source_layout import source_layout


@dataclass(frozen=True, kw_only=True)
class Cluster:
    nodes: tuple[str, ...]
    """Name of the node of each trainer rank"""
    engines: tuple[EnginePlace, ...]
    gpus: int
    """Number of GPUs of trainer, engines and teacher together"""
    num_nodes: int


def estimate_resync(
    path: Path, overrides: Sequence[str], *, gpus_per_node: int, machine: Machine, block_fp8: bool, to_json: bool
) -> None:
    """Print bytes by kind of link and seconds by stage.

    Args:
        block_fp8: take the engines' checkpoint to be in block FP8 even if its config.json does not say so.

    Raises:
        ValueError: the recipe is refused, or its model is unknown.
    """
    read, _ = read_recipe(path, overrides, "resync estimate")
    if read is not None and read.recipe.resync.transport not in ESTIMATED:
        # First, because the rules of this transport would ask for settings that only a run needs.
        raise RecipeError([read.problem("resync.transport", NOT_ESTIMATED)])
    planned = read_offline(path, overrides, "resync estimate")
    recipe, hf_config, model = planned.loaded.recipe, planned.hf_config, planned.model
    if gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node {gpus_per_node}: must be at least 1")
    if block_fp8 and BlockFp8.of_config(hf_config) is None:
        hf_config = {**hf_config, "quantization_config": BlockFp8().as_config()}
    drafts = sends_drafts(recipe)
    weight_map = family_of(hf_config).weight_map(hf_config, mtp=drafts).without_copies()
    transform = quantize_transform(hf_config, weight_map, fp8_engines=True)
    cluster = planned_cluster(recipe, gpus_per_node)
    transport = recipe.resync.transport
    layout = source_layout(hf_config, recipe.trainer, mtp=drafts)
    if reason := too_few_bytes(list(layout), recipe, transform):
        raise RecipeError([planned.loaded.problem("resync.bucket_bytes", reason)])
    with uncollected():
        result = estimate_version(
            recipe,
            hf_config,
            layout,
            cluster.nodes,
            cluster.engines,
            machine,
            transport=transport,
            transform=transform,
            replicated=replicated_names(weight_map),
        )
    facts = {
        "model": model,
        "transport": transport.value,
        "trainer_ranks": recipe.trainer.num_ranks,
        "engines": recipe.rollout.num_engines,
        "ranks_per_engine": recipe.rollout.engine_tp,
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
    """The placement of a run on as few nodes as possible, with its teacher, its older versions and its critic.

    Raises:
        ValueError: see `place_on_fewest`.
    """
    num_engines = recipe.rollout.num_engines if with_engines else 0
    placement, num_nodes = place_on_fewest(
        recipe,
        gpus_per_node,
        num_ranks=recipe.trainer.num_ranks,
        num_engines=num_engines,
        num_teachers=recipe.teacher.engines_to_start if with_engines else 0,
        num_past=recipe.past_engines if with_engines else 0,
        num_critics=recipe.critic_ranks if with_engines else 0,
    )
    engines = tuple(
        EnginePlace(
            name=f"engine-{index}", nodes=tuple(dict.fromkeys(slot.node.name for slot in slots)), num_ranks=len(slots)
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
    """Tensors that tensor parallelism does not shard, and their scales if they are quantised."""
    names = [name for entry in weight_map.entries if entry.rule.shard is None for t in entry.hf for name in t.names]
    return frozenset(names + [name + SCALE_SUFFIX for name in names])


def _print(facts: dict[str, Any], result: Estimate) -> None:
    console = plain_console()
    console.print(f"model: {facts['model']}")
    fp8 = ", block FP8" if facts["block_fp8"] else ""
    console.print(
        f"trainer ranks: {facts['trainer_ranks']}, engines: {facts['engines']} with "
        f"{counted(facts['ranks_per_engine'], 'rank')}, nodes: {facts['nodes']} with "
        f"{counted(facts['gpus_per_node'], 'GPU')}, resync.transport: {facts['transport']}{fp8}"
    )
    sent = "" if result.sent_bytes == result.gathered_bytes else f", sent as {show_bytes(result.sent_bytes)}"
    parts = ""
    if isinstance(result, BucketEstimate):
        parts = f" and {counted(result.buckets, 'bucket')} of at most {show_bytes(facts['bucket_bytes'])}"
    console.print(f"{show_bytes(result.gathered_bytes)}{sent}, in {counted(result.tensors, 'tensor')}{parts}")
    console.print()
    console.print(_table(("link", "bytes"), [(name, show_bytes(n)) for name, n in result.link_bytes.items()]))
    console.print(_table(("stage", "time"), [(name, _duration(s)) for name, s in result.stage_seconds.items()]))
    if isinstance(result, PeerEstimate):
        _print_peers(console, result)
    console.print(f"estimated: {_duration(result.seconds)} from the first byte to the last; stages overlap")


def _print_peers(console: Console, result: PeerEstimate) -> None:
    rows = [
        ("sent by each trainer rank", _spread(result.sent_by_rank)),
        ("kept by each engine rank", _spread(result.kept_by_rank)),
        ("busiest adapter, one way", show_bytes(result.adapter_bytes)),
        ("rounds", f"{result.rounds:,}"),
        ("messages to an engine", f"{result.messages:,}"),
        ("regions to all engines", f"{result.entries:,}"),
    ]
    if result.chain > 1:
        rows.append(("engines in a chain", f"{result.chain:,}"))
    console.print(_table(("of the messages", ""), rows))
    console.print(f"limit: {_duration(result.limit_seconds)} for the busiest rank, by its link")


def _spread(of: Spread) -> str:
    return f"{show_bytes(of.least)} to {show_bytes(of.most)}, mean {show_bytes(of.mean)}"


def _table(titles: tuple[str, str], rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(titles[0])
    table.add_column(titles[1], justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.2f} {name}"
    return f"{seconds * 1e6:,.2f} us"
