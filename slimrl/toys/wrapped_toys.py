"""Toys of wrapped models: the text model of a toy, in the config and beside the vision tower of a multimodal one.

The towers have two layers 16 wide. Names and keys are those of released checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from slimrl.base.seeds import derive_seed
from slimrl.config.hf_config import expert_columns
from slimrl.config.wrapper import WRAPPED_IN, Stacking, text_config, wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.wrapped_layout import WrappedLayout
from slimrl.toys.toy_configs import TOYS, ToySize

if TYPE_CHECKING:
    from torch import Tensor

_LAYERS, _WIDE, _MLP, _HEADS, _PATCH, _MERGED = 2, 16, 24, 2, 4, 4
"""Sizes of a tower: layers, their width, that of their MLPs, attention heads, a patch's side, and patches that make one
token."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def _qwen3_vl(size: ToySize, name: str, model_type: str, text: str) -> dict[str, Any]:
    half = size.head_dim // 2
    config = TOYS[text](size)
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": {
            **{key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")},
            "model_type": f"{model_type}_text",
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
                "rope_type": "default",
            },
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "deepstack_visual_indexes": [0, 1],
            "depth": _LAYERS,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": _WIDE,
            "in_channels": 3,
            "intermediate_size": _MLP,
            "model_type": model_type,
            "num_heads": _HEADS,
            "num_position_embeddings": 16,
            "out_hidden_size": size.hidden,
            "patch_size": _PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _qwen3_5(size: ToySize, name: str, model_type: str) -> dict[str, Any]:
    """The text model of its toy as it is, and a tower without the mergers of Qwen3-VL's inner layers."""
    config = _qwen3_vl(size, name, model_type, model_type)
    text = TOYS[model_type](size)
    del text["architectures"], text["tie_word_embeddings"]
    config["vision_config"]["deepstack_visual_indexes"] = []
    return {**config, "text_config": text}


def _kimi_k25(size: ToySize) -> dict[str, Any]:
    positions = {"height": 4, "width": 4, "time": 2}
    tower = {
        "hidden_size": _WIDE,
        "intermediate_size": _MLP,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": TOYS["deepseek_v3"](size),
        "tie_word_embeddings": False,
        # transformers' key; SGLang's are in vision_config.
        "projection_hidden_size": _WIDE,
        "vision_config": {
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": _WIDE,
            "patch_size": _PATCH,
            "text_hidden_size": size.hidden,
            # Released names, and those that transformers and SGLang know: released towers have their defaults.
            **{f"{prefix}pos_emb_{axis}": number for prefix in ("init_", "") for axis, number in positions.items()},
            **{prefix + name: number for prefix in ("vt_", "") for name, number in tower.items()},
        },
    }


WRAPPED_TOYS: dict[str, Callable[[ToySize], dict[str, Any]]] = {
    "qwen3_vl": lambda size: text_config(_qwen3_vl(size, "Qwen3VL", "qwen3_vl", "qwen3")),
    "qwen3_vl_moe": lambda size: text_config(_qwen3_vl(size, "Qwen3VLMoe", "qwen3_vl_moe", "qwen3_moe")),
    "qwen3_5_wrapped": lambda size: text_config(_qwen3_5(size, "Qwen3_5", "qwen3_5")),
    "qwen3_5_moe_wrapped": lambda size: text_config(_qwen3_5(size, "Qwen3_5Moe", "qwen3_5_moe")),
    "kimi_k25": lambda size: text_config(_kimi_k25(size)),
}
"""Function that makes the text model's config of each kind; config.json is the stored config.

By the `model_type` of the stored one, with a suffix where a family of text models has that name."""


def toy_layout(hf_config: dict[str, Any], specs: list[TensorSpec]) -> WrappedLayout:
    """The layout of a toy with these tensors of the text model, as its kind is released.

    Where a stacked matrix is square, experts are stacked outputs first: transformers goes by the shape of each tensor,
    and takes a square one for that.
    """
    wrapper = wrapper_of(hf_config)
    assert wrapper is not None, "the config is of no wrapped model"
    hidden, wide = int(hf_config["hidden_size"]), expert_columns(hf_config)
    inputs_first = wrapper.stacked is Stacking.inputs_first and hidden not in (wide, 2 * wide)
    experts = max((int(match[2]) + 1 for spec in specs if (match := _EXPERT.fullmatch(spec.name))), default=0)
    stored: dict[str, TensorSpec] = {}
    for spec in specs:
        match = _EXPERT.fullmatch(spec.name)
        name, shape = spec.name, spec.shape
        if match and wrapper.stacked is not None:
            down = match[3] == "down_proj"
            name = f"{match[1]}.{'down_proj' if down else 'gate_up_proj'}"
            shape = (shape[0] if down else 2 * shape[0], shape[1])
            shape = (experts, *(shape[::-1] if inputs_first else shape))
        name = wrapper.stored_name(name)
        stored[name] = TensorSpec(name=name, shape=shape, dtype=spec.dtype)
    shapes = _kimi_tower(hf_config) if wrapper.model_type == "kimi_k25" else _qwen_tower(hf_config)
    vision = {name: TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes}
    return WrappedLayout(hf_config, stored | vision)


def random_vision(layout: WrappedLayout, std: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of other modalities, each from its own seed."""
    import torch

    for name, spec in layout.carried.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, name))
        yield name, torch.empty(spec.shape).normal_(0.0, std, generator=generator)


def _linear(name: str, rows: int, columns: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,))]


def _norm(name: str, size: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (size,)), (f"{name}.bias", (size,))]


def _qwen_tower(hf_config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of Qwen3-VL's tower."""
    visual, merged, hidden = "model.visual.", _WIDE * _MERGED, int(hf_config["hidden_size"])
    found: list[tuple[str, tuple[int, ...]]] = [
        (f"{visual}patch_embed.proj.weight", (_WIDE, 3, 2, _PATCH, _PATCH)),
        (f"{visual}patch_embed.proj.bias", (_WIDE,)),
        (f"{visual}pos_embed.weight", (16, _WIDE)),
    ]
    for layer in range(_LAYERS):
        block = f"{visual}blocks.{layer}."
        found += _norm(block + "norm1", _WIDE) + _norm(block + "norm2", _WIDE)
        found += _linear(block + "attn.qkv", 3 * _WIDE, _WIDE) + _linear(block + "attn.proj", _WIDE, _WIDE)
        found += _linear(block + "mlp.linear_fc1", _MLP, _WIDE) + _linear(block + "mlp.linear_fc2", _WIDE, _MLP)
    inner = len(hf_config[WRAPPED_IN]["vision_config"]["deepstack_visual_indexes"])
    for merger, norm in [("merger", _WIDE), *((f"deepstack_merger_list.{index}", merged) for index in range(inner))]:
        found += _norm(f"{visual}{merger}.norm", norm)
        found += _linear(f"{visual}{merger}.linear_fc1", merged, merged)
        found += _linear(f"{visual}{merger}.linear_fc2", hidden, merged)
    return found


def _kimi_tower(hf_config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of Kimi-K2.5's tower and projector."""
    tower, merged, hidden = "vision_tower.", _WIDE * _MERGED, int(hf_config["hidden_size"])
    found: list[tuple[str, tuple[int, ...]]] = [
        (f"{tower}patch_embed.proj.weight", (_WIDE, 3, _PATCH, _PATCH)),
        (f"{tower}patch_embed.proj.bias", (_WIDE,)),
        (f"{tower}patch_embed.pos_emb.weight", (4, 4, _WIDE)),
    ]
    for layer in range(_LAYERS):
        block = f"{tower}encoder.blocks.{layer}."
        found += _norm(block + "norm0", _WIDE) + _norm(block + "norm1", _WIDE)
        found += _linear(block + "wqkv", 3 * _WIDE, _WIDE) + _linear(block + "wo", _WIDE, _WIDE)
        found += _linear(block + "mlp.fc0", _MLP, _WIDE) + _linear(block + "mlp.fc1", _WIDE, _MLP)
    found += _norm(f"{tower}encoder.final_layernorm", _WIDE) + _norm("mm_projector.pre_norm", _WIDE)
    return found + _linear("mm_projector.proj.0", merged, merged) + _linear("mm_projector.proj.2", hidden, merged)
