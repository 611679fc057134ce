"""The weighted mean of checkpoints of one model, tensor by tensor."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from slimrl_tools.derive.rewrite import Rewrite
from slimrl_tools.inspect.model_facts import different_facts
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.checkpoints.hf_checkpoint import form_of
from slimrl.checkpoints.stacked_experts import restacked
from slimrl.config.hf_config import stacks_experts
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import dtype_name, plain_config, read_hf_config

MAX_LISTED = 5
"""Differences between two checkpoints that an error lists."""


def averaging(
    readers: Sequence[CheckpointReader], weights: Sequence[float] | None = None, dtype: str | None = None
) -> Rewrite:
    """The mean, summed in float32; holds the sum and one tensor of one checkpoint at a time.

    Args:
        readers: of Hugging Face checkpoints, open until it is written; config and tokenizer are the first's.
        weights: one per checkpoint, adding up to 1; None for equal weights.
        dtype: as torch prints it, for tensors that have the dtype of the first's config; others keep their own. None
            keeps all.

    Raises:
        ValueError: the checkpoints are not of one model, or the weights do not fit.
    """
    weights = _checked_weights(weights, len(readers))
    first, *others = readers
    config = read_hf_config(first.path)
    for reader in others:
        _check_alike(first, config, reader)
    before = dtype_name(config)
    specs = [
        replace(spec, dtype=(dtype or before) if spec.dtype == before else spec.dtype) for spec in first.specs.values()
    ]

    def produce(group: Sequence[TensorSpec]) -> Iterable[tuple[str, Tensor]]:
        for spec in group:
            yield spec.name, weighted_sum((read_whole(reader, spec.name) for reader in readers), weights)

    stored = specs
    make: Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Tensor]]] = produce
    if stacks_experts(config):
        stored, make = restacked(family_of(config).weight_map(config), specs, produce)
    return Rewrite(
        command="average",
        sources=[reader.path for reader in readers],
        specs=stored,
        produce=make,
        config=plain_config(config, dtype or before),
        form=form_of(first),
        options={"weights": weights, "dtype": dtype},
    )


def weighted_sum(tensors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """float32 sum of `weight * tensor`, in order; tensors may be of any floating-point dtype."""
    total: Tensor | None = None
    for tensor, weight in zip(tensors, weights, strict=True):
        if total is None:
            total = tensor.to(torch.float32, copy=True).mul_(weight)
        else:
            total.add_(tensor, alpha=weight)
    assert total is not None, "nothing to sum"
    return total


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if count < 2:
        raise ValueError("give at least two checkpoints to average, and the output folder")
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ValueError(f"--weights: {len(weights)} of them for {count} checkpoints")
    if not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise ValueError(f"--weights: they add up to {sum(weights):g}; they must add up to 1, or the model is scaled")
    return list(weights)


def _check_alike(first: CheckpointReader, config: dict[str, Any], other: CheckpointReader) -> None:
    """Raises ValueError listing differences between two checkpoints' configs and shapes."""
    differences = different_facts(config, read_hf_config(other.path))
    shapes, found = ({name: spec.shape for name, spec in reader.specs.items()} for reader in (first, other))
    for name in [*shapes, *(name for name in found if name not in shapes)]:
        if shapes.get(name) != found.get(name):
            sides = [list(shape) if (shape := side.get(name)) else "absent" for side in (shapes, found)]
            differences.append(f"{name}: {sides[0]} and {sides[1]}")
    if differences:
        more = [f"and {len(differences) - MAX_LISTED} more"] if len(differences) > MAX_LISTED else []
        listed = "\n  ".join(differences[:MAX_LISTED] + more)
        raise ValueError(f"{first.path} and {other.path} are not of one model:\n  {listed}")
