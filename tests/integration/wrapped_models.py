"""Small random checkpoints of every kind of wrapped model, with the names and keys of released ones.

transformers writes another form than it reads: experts of Qwen3-VL-MoE are not transposed, and some names of Kimi-K2.5
are neither those of its releases nor read again.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_models import CONFIGS, randomise
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from slimrl.config.wrapper import Stacking, wrapper_of

_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_MROPE = {
    "rope_theta": 10_000.0,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
}
_KIMI_POSITIONS = {"height": 4, "width": 4, "time": 2}
_KIMI_TOWER = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 2, "num_hidden_layers": 2}
_KIMI_VISION = {
    "patch_size": 4,
    "merge_kernel_size": [2, 2],
    # Released names, and those that transformers reads.
    **{f"{prefix}pos_emb_{axis}": size for prefix in ("init_", "") for axis, size in _KIMI_POSITIONS.items()},
    **{prefix + name: size for prefix in ("vt_", "") for name, size in _KIMI_TOWER.items()},
    "mm_hidden_size": 24,
    "text_hidden_size": 32,
}


def _qwen(model_type: str, text: str, **changes: Any) -> dict[str, Any]:
    config = {"model_type": model_type, "tie_word_embeddings": False, **changes}
    text_config = {**CONFIGS[text], **_MROPE, "rms_norm_eps": 1e-6, "model_type": f"{model_type}_text"}
    config["text_config"] = text_config
    config["vision_config"] = _QWEN_VISION
    return config


def _qwen3_5(text: str) -> dict[str, Any]:
    return {
        "model_type": text,
        "tie_word_embeddings": False,
        "text_config": {**CONFIGS[text], "rms_norm_eps": 1e-6, "model_type": f"{text}_text"},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
    }


WRAPPED: dict[str, dict[str, Any]] = {
    "qwen3_vl": _qwen("qwen3_vl", "qwen3"),
    "qwen3_vl_tied": _qwen("qwen3_vl", "qwen3", tie_word_embeddings=True),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", "qwen3_moe"),
    "qwen3_5_wrapped": _qwen3_5("qwen3_5"),
    "qwen3_5_moe_wrapped": _qwen3_5("qwen3_5_moe"),
    "kimi_k25": {
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": {
            **CONFIGS["deepseek_v3"],
            "rms_norm_eps": 1e-6,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        "vision_config": _KIMI_VISION,
        "projection_hidden_size": 24,
    },
}
"""config.json by name: a kind of wrapped model, and what is special."""


def wrapped_model(name: str, path: Path, *, released: bool = True) -> Path:
    """Write the model of WRAPPED into a new folder; `released`: not as transformers saves it."""
    config = {key: value for key, value in WRAPPED[name].items() if key != "model_type"}
    torch.manual_seed(0)
    made = AutoConfig.for_model(WRAPPED[name]["model_type"], **json.loads(json.dumps(config)))
    model = AutoModelForImageTextToText.from_config(made)
    randomise(model, zero_centred=WRAPPED[name]["model_type"].startswith("qwen3_5"))
    model.save_pretrained(path)
    if released:
        own = {"dtype": "float32", "architectures": [wrapper_of(WRAPPED[name]).engine_class]}
        (path / "config.json").write_text(json.dumps({**WRAPPED[name], **own}, indent=2) + "\n")
        tensors = load_file(path / "model.safetensors")
        transposed = wrapper_of(WRAPPED[name]).stacked is Stacking.inputs_first
        named = dict(_released(*pair, transposed) for pair in tensors.items())
        save_file(named, path / "model.safetensors", {"format": "pt"})
    (path / "tokenizer.json").write_text("{}")
    return path


def experts_apart(path: Path) -> Path:
    """Give a checkpoint with stacked experts in the released form one tensor for each matrix of an expert."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        match = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name)
        if match is None:
            tensors[name] = tensor
            continue
        matrices = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        for expert, whole in enumerate(tensor):
            for matrix, part in zip(matrices, whole.T.chunk(len(matrices)), strict=True):
                tensors[f"{match[1]}.{expert}.{matrix}.weight"] = part.contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


_RENAMED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}
"""Parts of names of Kimi-K2.5 as transformers saves them -> as they are released."""


def _released(name: str, tensor: Tensor, transposed: bool) -> tuple[str, Tensor]:
    if transposed and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return name, tensor.transpose(1, 2).contiguous()
    for saved, released in _RENAMED.items():
        name = name.replace(saved, released)
    return name, tensor
