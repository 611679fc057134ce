"""The adapter_config.json with which PEFT loads a model's adapters. Torch-free.

transformers 5 holds all experts of a layer in two parameters. PEFT (0.21, utils/transformers_weight_conversion.py) maps
gate_proj, up_proj and down_proj in `target_modules` to these, and joins the adapters of a file that names every expert.
It then forgets layers of the same names outside of experts. As `target_parameters` it keeps them, so dense MLPs and
shared experts of a model with experts are named there.
"""

from collections.abc import Iterable
from typing import Any

from slimrl.config.lora_rules import MLP, adapter_targets
from slimrl.config.schema.trainer import LoraConfig


def peft_config(
    lora: LoraConfig, adapters: Iterable[str], hf_config: dict[str, Any], base_model: str
) -> dict[str, Any]:
    """
    Args:
        adapters: names of the adapters' tensors in the file.
        base_model: folder or id of the model that they belong to.
    """
    mlp_parents = {parent for parent, layer in map(_place, adapters) if layer in MLP}
    targets, beside_experts = adapter_targets(lora, hf_config), sorted(mlp_parents - {"experts"})
    parameters = [f"{parent}.{layer}.weight" for parent in beside_experts for layer in MLP if layer in targets]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # Only training drops values, and PEFT refuses dropout in experts.
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(targets),
        "target_parameters": parameters if parameters and "experts" in mlp_parents else None,
    }


def _place(name: str) -> tuple[str, str]:
    """(the module around it, the layer) of an adapter, as (`shared_experts`, `up_proj`), without an expert's number."""
    *path, layer, _, _ = name.split(".")
    return next(part for part in reversed(path) if not part.isdigit()), layer
