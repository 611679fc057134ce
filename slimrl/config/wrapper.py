"""Wrapped models: multimodal checkpoints of which slimrl trains and serves the text model. Torch-free.

Their config.json nests the text model's under `text_config`, and their tensors have a prefix. Everything in slimrl sees
the text model: `text_config` reads the config as that of the text model's family, and checkpoints/wrapped_folder.py the
tensors. What is written has the form of the source again (`stored_config`), with the tensors of the other modalities
unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

WRAPPED_IN = "wrapped_in"
"""Key of a text model's config in slimrl with the whole config.json of the checkpoint that wraps it. Never written."""

INHERITED = (
    ("dtype", "torch_dtype"),
    ("quantization_config",),
    ("bos_token_id",),
    ("eos_token_id",),
    ("pad_token_id",),
)
"""Keys that `text_config` may leave to the config around it; names of one thing are together."""

TIED = "tie_word_embeddings"


class Stacking(Enum):
    """Order of the dimensions of a tensor with a matrix of each expert."""

    outputs_first = "[experts, out, in]"
    inputs_first = "[experts, in, out]"


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    model_type: str
    """`model_type` of config.json"""
    text_types: Mapping[str, str]
    """`model_type` of `text_config` -> that of the family which computes the same for text; the first is the default"""
    prefix: tuple[str, str]
    """Prefix of the text model's names in a checkpoint, and what it replaces in those of the family"""
    carried: tuple[str, ...]
    """Prefixes of the tensors that a checkpoint's export copies: vision towers and projectors"""
    stacked: Stacking | None = None
    """How released checkpoints, and SGLang, have all experts of a layer in two tensors, `gate_up_proj` and `down_proj`.
    Others of the kind may have the other order or one tensor for each matrix. None if none of the kind stacks them"""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Values of keys that the family requires and a config may lack, since the wrapped model's class has no other"""
    tied: bool | None = False
    """Whether the output layer is tied to the embedding if the outer config does not say so; None leaves it to
    `text_config`"""
    engine_class: str
    """Name of SGLang's class"""
    engine_prefix: str = ""
    """Prefix of the text model's parameters in SGLang's class"""
    engine_carried: tuple[str, ...]
    """Prefixes of the parameters there that belong to other modalities"""
    block_fp8: bool = True
    """Whether SGLang finds the modules that `modules_to_not_convert` names as they are in the checkpoint"""
    engine_builds_tower: bool = False
    """Whether SGLang builds the vision tower though it serves text alone"""

    def text_name(self, stored: str) -> str:
        """The family's name for that of a tensor or module of the checkpoint; other names stay as they are."""
        before, instead = self.prefix
        return instead + stored.removeprefix(before) if stored.startswith(before) else stored

    def stored_name(self, text: str) -> str:
        """The name in the checkpoint for one of the family; layers for multi-token prediction keep theirs."""
        before, instead = self.prefix
        return before + text.removeprefix(instead) if text.startswith(instead) else text


WRAPPERS = (
    Wrapper(
        model_type="qwen3_vl",
        text_types={"qwen3_vl_text": "qwen3"},
        prefix=("model.language_model.", "model."),
        carried=("model.visual.",),
        engine_class="Qwen3VLForConditionalGeneration",
        engine_carried=("visual.",),
    ),
    Wrapper(
        model_type="qwen3_vl_moe",
        text_types={"qwen3_vl_moe_text": "qwen3_moe"},
        prefix=("model.language_model.", "model."),
        carried=("model.visual.",),
        stacked=Stacking.inputs_first,
        defaults={"norm_topk_prob": True},
        engine_class="Qwen3VLMoeForConditionalGeneration",
        engine_carried=("visual.",),
    ),
    Wrapper(
        model_type="qwen3_5",
        text_types={"qwen3_5_text": "qwen3_5_text"},
        prefix=("model.language_model.", "model."),
        carried=("model.visual.",),
        engine_class="Qwen3_5ForConditionalGeneration",
        engine_carried=("visual.",),
    ),
    Wrapper(
        model_type="qwen3_5_moe",
        text_types={"qwen3_5_moe_text": "qwen3_5_moe_text"},
        prefix=("model.language_model.", "model."),
        carried=("model.visual.",),
        stacked=Stacking.outputs_first,
        engine_class="Qwen3_5MoeForConditionalGeneration",
        engine_carried=("visual.",),
    ),
    Wrapper(
        model_type="kimi_k25",
        text_types={"deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2"},
        prefix=("language_model.", ""),
        carried=("vision_tower.", "mm_projector."),
        tied=None,
        engine_class="KimiK25ForConditionalGeneration",
        engine_prefix="language_model.",
        engine_carried=("vision_tower.", "mm_projector."),
        block_fp8=False,
        engine_builds_tower=True,
    ),
)


def wrapper_of(hf_config: Mapping[str, Any]) -> Wrapper | None:
    """The kind of wrapped model that a config is of, as stored or as `text_config` gives it; None for a text model."""
    model_type = hf_config.get(WRAPPED_IN, hf_config).get("model_type")
    return next((wrapper for wrapper in WRAPPERS if wrapper.model_type == model_type), None)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a wrapped model's text model, as of a checkpoint that holds nothing else; others stay as they are.

    Raises:
        ValueError: there is no `text_config`, or it is of another kind than those of this wrapper.
    """
    wrapper = wrapper_of(config)
    if wrapper is None or WRAPPED_IN in config:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"config.json: model_type {wrapper.model_type!r} needs an object text_config")
    given = text.get("model_type", next(iter(wrapper.text_types)))
    if given not in wrapper.text_types:
        known = ", ".join(wrapper.text_types)
        raise ValueError(
            f"config.json: text_config.model_type {given!r} is not supported in a {wrapper.model_type}; known: {known}"
        )
    own = {**text, "model_type": wrapper.text_types[given], WRAPPED_IN: config}
    for names in INHERITED:
        if all(own.get(name) is None for name in names):
            own |= {name: config[name] for name in names if config.get(name) is not None}
    for name, value in wrapper.defaults.items():
        own.setdefault(name, value)
    tied = config.get(TIED, wrapper.tied)
    return own if tied is None else {**own, TIED: tied}


def stored_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a text model's config, in the config around it if it has been read from one.

    What has changed since then is written where it was read.
    """
    if WRAPPED_IN not in hf_config:
        return dict(hf_config)
    outer = dict(hf_config[WRAPPED_IN])
    before, text = text_config(hf_config[WRAPPED_IN]), dict(outer["text_config"])
    for name in {**before, **hf_config}:
        if name == WRAPPED_IN or before.get(name) == hf_config.get(name):
            continue
        # SGLang looks for the quantisation in the config around.
        new = outer if name == "quantization_config" else text
        holders = [holder for holder in (text, outer) if holder.get(name) is not None] or [new]
        for holder in holders:
            if name in hf_config:
                holder[name] = hf_config[name]
            else:
                del holder[name]
    return {**outer, "text_config": text}


def family_type(model_type: str) -> str:
    """`model_type` of the family for that of a `text_config`; others stay as they are."""
    return next((w.text_types[model_type] for w in WRAPPERS if model_type in w.text_types), model_type)
