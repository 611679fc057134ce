"""Values of a Hugging Face config.json, whichever release of transformers wrote it, and the configs we ship."""

import json
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from slimrl.config.hf_config import read_hf_config as read_hf_config
from slimrl.config.hf_config import write_hf_config as write_hf_config
from slimrl.config.hub import CONFIG_FILES, cached, hub_model
from slimrl.config.wrapper import WRAPPED_IN, text_config
from slimrl.models.published_index import is_stored_in

FP8_SUFFIX = "-FP8"
"""End of the name of a published model's checkpoint in block FP8."""

PLAIN_SUFFIX = "-BF16"
"""End of the name of a plain cast of a model that is published in block FP8, in either case."""

OF_SAME_SIZES = {
    **dict.fromkeys(("DeepSeek-R1", "DeepSeek-V3-0324", "DeepSeek-V3.1"), "DeepSeek-V3"),
    **dict.fromkeys(("MiniMax-M2.1", "MiniMax-M2.5", "MiniMax-M2.7"), "MiniMax-M2"),
    **dict.fromkeys(("Kimi-K2.6", "Kimi-K2.7-Code"), "Kimi-K2.5"),
    **{f"OLMoE-1B-7B-{name}": "OLMoE-1B-7B-0924" for name in ("0924-Instruct", "0125", "0125-Instruct")},
    **{f"{name}-{kind}": name for name in ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B") for kind in ("Instruct", "Thinking")},
}
"""Published model -> the one whose config and tensors it has. V3.1's scales of FP8 are powers of two, which no size
depends on; M2.7's context is longer, 204,800 tokens for 196,608; Kimi-K2.6 ends its turns with another token. OLMoE's
0125 is stored in float32."""

SCALE_SUFFIX = "_scale_inv"
"""Suffix that makes the name of the scales from that of a tensor in block FP8."""

FP8_BLOCK = (128, 128)
"""Default rows and columns of a tile, which has one scale."""

BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(FP8_BLOCK),
    "modules_to_not_convert": [],
}
"""`quantization_config` of such a checkpoint, as quantization/fp8.py writes it."""

MXFP4 = {"quant_method": "mxfp4"}
"""`quantization_config` of a checkpoint whose experts are in MXFP4."""

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Suffixes of the names of the two tensors that store one in MXFP4."""

MXFP4_BLOCK = 32
"""Values of MXFP4 that share a scale, neighbours in a row."""

MXFP4_REFUSED = (
    "quantization_config: the experts are in MXFP4, to which no resync and no export rounds. `slimrl-tools dequantize` "
    "writes the model in bfloat16, for trainer and engines; without engines (`slimrl sft`) it is read as it is"
)

PACKED_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    },
}
"""`quantization_config` of a checkpoint whose experts are in INT4, as Kimi-K2-Thinking and Kimi-K2.5 have it."""

PACKED_SUFFIX, PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX = "_packed", "_scale", "_shape"
"""Suffixes of the names of the three tensors that store a matrix in INT4."""

INT4_PER_WORD = 8
"""Columns of INT4 in an int32."""

INT4_REFUSED = (
    "quantization_config: the experts are in INT4, and a resync would send engines others. `slimrl-tools dequantize` "
    "writes the model in bfloat16, for trainer and engines; without engines (`slimrl sft`) it is read as it is"
)

DEFAULT_DTYPE = "float32"
"""Dtype of a checkpoint whose config names none."""


def required(hf_config: dict[str, Any], *names: str) -> Any:
    """The value of the first of these keys that is not null; transformers 5 renamed some.

    Raises:
        ValueError: all are missing or null.
    """
    for name in names:
        if hf_config.get(name) is not None:
            return hf_config[name]
    around = "text_config." if WRAPPED_IN in hf_config else ""
    raise ValueError(f"config.json: no {' or '.join(around + name for name in names)}")


def head_dim(hf_config: dict[str, Any]) -> int:
    explicit = hf_config.get("head_dim")
    return int(explicit or required(hf_config, "hidden_size") // required(hf_config, "num_attention_heads"))


def dtype_name(hf_config: dict[str, Any]) -> str:
    """Element type of the checkpoint, as torch prints it without the prefix."""
    return str(hf_config.get("dtype") or hf_config.get("torch_dtype") or DEFAULT_DTYPE).removeprefix("torch.")


def plain_config(hf_config: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
    """config.json of unquantised weights in `dtype`, as torch prints it; None keeps the config's."""
    config = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return config


def is_mxfp4(hf_config: Mapping[str, Any]) -> bool:
    """Whether config.json says that experts are in MXFP4."""
    return (hf_config.get("quantization_config") or {}).get("quant_method") == MXFP4["quant_method"]


def unsendable_format(hf_config: Mapping[str, Any]) -> str | None:
    """Why engines cannot hold a model in the format of its files while a trainer updates it; None if they can."""
    if is_mxfp4(hf_config):
        return MXFP4_REFUSED
    quantization = hf_config.get("quantization_config") or {}
    packed = all(quantization.get(key) == PACKED_INT4[key] for key in ("quant_method", "format"))
    return INT4_REFUSED if packed else None


def unpacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same tensors with each matrix that is in INT4 in place of the three that store it."""
    unpacked = dict(shapes)
    for name in shapes:
        if name.endswith(f".weight{PACKED_SUFFIX}"):
            matrix = name.removesuffix(PACKED_SUFFIX)
            rows, words = unpacked.pop(name)
            for suffix in (PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX):
                unpacked.pop(matrix + suffix, None)
            unpacked[matrix] = (rows, words * INT4_PER_WORD)
    return unpacked


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta`.

    Raises:
        ValueError: neither is there.
    """
    rope = hf_config.get("rope_parameters") or {}
    return float(rope["rope_theta"] if "rope_theta" in rope else required(hf_config, "rope_theta"))


def rope_scaling(hf_config: dict[str, Any]) -> dict[str, Any]:
    """`rope_type` ("default" without scaling) and its settings, by transformers' names."""
    settings = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    legacy_kind = settings.pop("type", None)
    for other in ("rope_theta", "partial_rotary_factor"):
        settings.pop(other, None)
    return {**settings, "rope_type": settings.get("rope_type") or legacy_kind or "default"}


def partial_rotary_factor(hf_config: dict[str, Any], default: float = 1.0) -> float:
    """Fraction of a head's dimensions that are rotated; released models of MiniMax have their number."""
    for settings in (hf_config.get("rope_parameters") or {}, hf_config):
        if settings.get("partial_rotary_factor") is not None:
            return float(settings["partial_rotary_factor"])
    rotated = hf_config.get("rotary_dim")
    return default if rotated is None else rotated / head_dim(hf_config)


def published_names() -> list[str]:
    """Models whose config this package ships."""
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir() if file.name.endswith(".json"))


def published_model(folder: str) -> str | None:
    """The model of `published_names` whose sizes a folder of this name has, in whichever format; None if unknown."""
    name = folder.removesuffix(FP8_SUFFIX)
    if name.upper().endswith(PLAIN_SUFFIX):
        name = name[: -len(PLAIN_SUFFIX)]
    name = OF_SAME_SIZES.get(name, name)
    return name if name in published_names() else None


def published_config(name: str) -> dict[str, Any]:
    """The full-size config of a published model, for checks that need no checkpoint.

    Raises:
        ValueError: a name that is not in `published_names`.
    """
    if name not in published_names():
        raise ValueError(f"no published config {name!r}; known: {', '.join(published_names())}")
    return text_config(json.loads((_folder() / f"{name}.json").read_text()))


def config_for_planning(model_path: Path) -> tuple[dict[str, Any], str]:
    """The config.json of a checkpoint, or of the published model of that name if there is no such folder.

    An id of the Hub is the model in the local cache if it is there; the Hub is not asked.
    For commands that plan without weights. A name that ends in -FP8 is the published model in block FP8, and so is the
    own name of a model that is published in it; one that ends in -BF16 is its cast.

    Returns:
        The config, and a few words on where it is from.

    Raises:
        ValueError: there is no such folder and no published model of its name, or the folder holds no config.json.
    """
    if os.path.exists(model_path):
        return read_hf_config(model_path), str(model_path)
    hub = hub_model(str(model_path))
    if hub is not None and (folder := cached(hub, CONFIG_FILES)) is not None:
        return read_hf_config(folder), f"{hub.model_id} in the cache of the Hugging Face Hub"
    given = model_path.name
    if (name := published_model(given)) is not None:
        config, same = (
            published_config(name),
            f", whose sizes {given} has" if given.startswith(tuple(OF_SAME_SIZES)) else "",
        )
        plain = given.upper().endswith(PLAIN_SUFFIX)
        if given.endswith(FP8_SUFFIX) or (not plain and is_stored_in(name, "F8_E4M3")):
            config, stored = {**config, "quantization_config": BLOCK_FP8}, "block FP8"
        elif not plain and is_stored_in(name, "U8"):
            config, stored = {**config, "quantization_config": MXFP4}, "MXFP4"
        elif not plain and is_stored_in(name, "I32"):
            config, stored = {**config, "quantization_config": PACKED_INT4}, "INT4"
        else:
            stored = dtype_name(config)
        return config, f"{name} as published{same}, in {stored}, for {model_path} is not here"
    known = ", ".join(sorted([*published_names(), *OF_SAME_SIZES]))
    near = f"; {meant} is nearest" if (meant := nearest_published(model_path)) else ""
    raise ValueError(
        f"{model_path}: no such folder, and {model_path.name!r} is none of the published models {known}{near}"
    )


def nearest_published(model_path: Path) -> str:
    """The published model that a folder's name probably means, of the same sizes; empty if there is none."""
    known = [*published_names(), *OF_SAME_SIZES]
    names = [*known, *(name + FP8_SUFFIX for name in known)]
    sizes = {name: re.findall(r"\d+", name) for name in (model_path.name, *names)}
    alike = {name.lower(): name for name in names if sizes[name] == sizes[model_path.name]}
    close = get_close_matches(model_path.name.lower(), alike, n=1, cutoff=0.8)
    return alike[close[0]] if close else ""


def _folder() -> Any:
    return resources.files("slimrl.models") / "hf_configs"
