"""Which layers the pipeline stages of a recipe begin with, from its values alone, as megatron-core assigns them."""

import re
from collections.abc import Sequence
from itertools import accumulate

from slimrl.config.schema.trainer import TrainerConfig


def first_layers(trainer: TrainerConfig, layers: int) -> list[int]:
    """The first layer of each stage, virtual ones included, counted from 0; a stage may have none.

    Returns:
        Empty if the stages do not hold the layers once each, which other rules or megatron-core refuse.
    """
    drawn = trainer.megatron.get("pipeline_model_parallel_layout")
    sizes = _drawn_sizes(drawn) if drawn else _given_sizes(trainer, layers)
    if sum(sizes) != layers or min(sizes) < 0:
        return []
    return [last - size for last, size in zip(accumulate(sizes), sizes, strict=True) if size]


def _given_sizes(trainer: TrainerConfig, layers: int) -> list[int]:
    """Layers of each stage, in the order of the model: the first and the last rank may have their own number, or the
    embedding and the output layer count as a layer each."""
    size, megatron = trainer.parallel.pipeline, trainer.megatron
    first, last = (int(megatron.get(f"num_layers_in_{end}_pipeline_stage") or 0) for end in ("first", "last"))
    embedding, loss = (bool(megatron.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    others = max(size - bool(first) - bool(last), 1)
    ranks = [(layers + embedding + loss - first - last) // others] * size
    ranks[0], ranks[-1] = first or ranks[0], last or ranks[-1]
    chunks = trainer.parallel.virtual_pipeline or 1
    sizes = [rank // chunks for _ in range(chunks) for rank in ranks]
    sizes[0] -= embedding
    sizes[-1] -= loss
    return sizes


def _drawn_sizes(layout: str | Sequence[Sequence[str]]) -> list[int]:
    """Layers of each stage of a `pipeline_model_parallel_layout`, such as "Ett|(tt|)*2L"."""
    if not isinstance(layout, str):
        return [str(stage).lower().count("decoder") for stage in layout]
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda found: found[1] * int(found[2]), layout)
    return [stage.count("t") for stage in layout.split("|")]
