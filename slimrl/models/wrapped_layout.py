"""Where a wrapped checkpoint stores the tensors of its text model, and how they become such a checkpoint again.

A checkpoint may hold all experts of a layer in two tensors; the text model's family has three matrices per expert.
The stacked ones are [experts, in, out] in released Qwen3-VL-MoE, [experts, out, in] where transformers 5 saved them.
In block FP8 scales are stacked as their matrices are. The layout is that of one checkpoint, so what is written has the
form of its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from slimrl.config.hf_config import expert_columns
from slimrl.config.wrapper import Stacking, wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.expert_stacks import ExpertStacks, Place
from slimrl.models.hf_config import FP8_BLOCK, SCALE_SUFFIX

_STACKED = re.compile(rf"(.+\.experts)\.(gate_up_proj|down_proj)({SCALE_SUFFIX})?")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked tensor -> the matrices in it, one behind the other along their outputs."""


class WrappedLayout(ExpertStacks):
    """
    Args:
        hf_config: of a wrapped model.
        stored: specs of all tensors of its checkpoint.

    Raises:
        ValueError: two tensors are the same of the text model, or stacked experts have another shape.
    """

    def __init__(self, hf_config: Mapping[str, Any], stored: Mapping[str, TensorSpec]) -> None:
        wrapper = wrapper_of(hf_config)
        assert wrapper is not None, "the config is of no wrapped model"
        super().__init__({}, {})
        self._wrapper = wrapper
        self.carried = {name: spec for name, spec in stored.items() if name.startswith(wrapper.carried)}
        """Tensors of other modalities, by their names in the checkpoint."""
        self.specs: dict[str, TensorSpec] = {}
        """Specs of the same; what is neither the text model's nor carried keeps its name."""
        stacked: list[tuple[re.Match[str], TensorSpec]] = []
        for name, spec in stored.items():
            if name in self.carried:
                continue
            text_name = wrapper.text_name(name)
            match = _STACKED.fullmatch(text_name)
            if match is None or not wrapper.stacked:
                self._add(replace(spec, name=text_name), Place(stored=name))
                continue
            self._shapes[name] = spec.shape
            stacked.append((match, spec))
        self.stacking = _stacking(hf_config, stacked) if stacked else None
        """How experts are stacked; None if they are not."""
        transposed = self.stacking is Stacking.inputs_first
        _check_scales(hf_config, stacked, transposed=transposed)
        for match, spec in stacked:
            for matrix, place in _matrices(match, spec, transposed=transposed):
                self._add(matrix, place)

    def _add(self, spec: TensorSpec, place: Place) -> None:
        if spec.name in self.places:
            raise ValueError(f"{place.stored} and {self.places[spec.name].stored} are both {spec.name}")
        self.places[spec.name], self.specs[spec.name] = place, spec

    def place(self, name: str) -> Place:
        """Place of a tensor of the text model, also of one that the checkpoint stores in another form or not at all."""
        return self.places.get(name, Place(stored=self._wrapper.stored_name(name)))

    def with_experts_apart(self) -> WrappedLayout:
        """The layout of the same checkpoint with one tensor for each matrix of an expert, to write one."""
        apart = copy(self)
        apart.places, apart._shapes, apart.stacking = {}, {}, None
        return apart


def _stacking(hf_config: Mapping[str, Any], stacked: Sequence[tuple[re.Match[str], TensorSpec]]) -> Stacking:
    """The order of dimensions, by the shapes of all stacked tensors: a square one does not tell.

    Raises:
        ValueError: they fit neither order of dimensions.
    """
    hidden, wide = hf_config.get("hidden_size"), expert_columns(dict(hf_config))
    due = {"gate_up_proj": (2 * wide, hidden), "down_proj": (hidden, wide)}
    shapes = {(match[2], spec.shape[1:]) for match, spec in stacked if not match[3]}
    if all(shape == due[kind] for kind, shape in shapes):
        return Stacking.outputs_first
    if all(shape == due[kind][::-1] for kind, shape in shapes):
        return Stacking.inputs_first
    found = ", ".join(f"{spec.name} {list(spec.shape)}" for _, spec in stacked[:2])
    raise ValueError(f"stacked experts do not fit config.json, hidden_size {hidden}, {wide} per expert: {found}")


def _check_scales(
    hf_config: Mapping[str, Any], stacked: Sequence[tuple[re.Match[str], TensorSpec]], *, transposed: bool
) -> None:
    """Raises ValueError: stacked scales have another shape, or a tile has rows of a gate and of an up matrix."""
    tile: Sequence[int] = (hf_config.get("quantization_config") or {}).get("weight_block_size") or FP8_BLOCK
    matrices = {spec.name: spec.shape for match, spec in stacked if not match[3]}
    for match, spec in stacked:
        shape = matrices.get(spec.name.removesuffix(SCALE_SUFFIX), ())
        if not match[3] or not shape:
            continue
        experts, *sizes = shape
        tiles = [-(-size // step) for size, step in zip(sizes, tile[::-1] if transposed else tile, strict=True)]
        if spec.shape != (experts, *tiles):
            raise ValueError(f"{spec.name}: scales {list(spec.shape)}, tiles of {list(tile)} need {[experts, *tiles]}")
        height = sizes[1 if transposed else 0] // len(_MATRICES[match[2]])
        if len(_MATRICES[match[2]]) > 1 and height % tile[0]:
            raise ValueError(f"{spec.name}: the {height} rows of an expert's gate are no whole tiles of {tile[0]}")


def _matrices(match: re.Match[str], spec: TensorSpec, *, transposed: bool) -> Iterator[tuple[TensorSpec, Place]]:
    """The experts' matrices, or their scales, in a stacked tensor, expert by expert."""
    path, kind, suffix = match.groups(default="")
    names = _MATRICES[kind]
    experts, outputs, inputs = spec.shape[0], *(spec.shape[:0:-1] if transposed else spec.shape[1:])
    height = outputs // len(names)
    for expert in range(experts):
        for index, name in enumerate(names):
            matrix = replace(spec, name=f"{path}.{expert}.{name}.weight{suffix}", shape=(height, inputs))
            yield matrix, Place(stored=spec.name, expert=expert, first=index * height, transposed=transposed)


def text_shapes(hf_config: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the text model's tensors by the family's names, from those of all that a wrapped checkpoint stores."""
    specs = {name: TensorSpec(name=name, shape=shape, dtype="bfloat16") for name, shape in stored.items()}
    return {name: spec.shape for name, spec in WrappedLayout(hf_config, specs).specs.items()}
