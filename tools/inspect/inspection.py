"""Describes a checkpoint by its config and headers; reads no tensor but a head that repeats the embedding.

If the family is not supported, only the files are described, with the reason.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl_tools.open_checkpoint import FoundCheckpoint, find_checkpoint, open_found
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slimrl.checkpoints.hf_checkpoint import form_of
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata
from slimrl.checkpoints.wrapped_folder import WrappedFolder
from slimrl.config.wrapper import WRAPPED_IN, wrapper_of
from slimrl.models.architecture import FACTS_FILE, read_facts
from slimrl.models.families.mtp import num_mtp_layers
from slimrl.models.family import family_of
from slimrl.models.hf_config import config_for_planning
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.parameters import count_parameters
from slimrl.models.tensor_names import find_mismatches
from slimrl.models.weight_map import WeightMap

MAX_NAMED = 5
"""Missing, unknown or misshaped tensors that are named; the rest are counted."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pth", "*.gguf", ".metadata", "trainer")
"""Names in a folder of those that hold weights."""

ARCHITECTURE = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "attention heads": "num_attention_heads",
    "key-value heads": "num_query_groups",
    "head dimension": "kv_channels",
    "query LoRA rank": "q_lora_rank",
    "key-value LoRA rank": "kv_lora_rank",
    "dense MLP width": "ffn_hidden_size",
    "routed experts": "num_moe_experts",
    "experts per token": "moe_router_topk",
    "expert groups": "moe_router_num_groups",
    "expert width": "moe_ffn_hidden_size",
    "shared expert width": "moe_shared_expert_intermediate_size",
}
"""Label -> key of the family's Megatron config."""


def inspect_checkpoint(path: Path, hf_dir: Path | None = None) -> dict[str, Any]:
    """Facts of a checkpoint as JSON values.

    Args:
        path: a checkpoint in any format; or a folder with config.json alone, the id of a model on the Hub or the name
            of a published one, as `slimrl plan` finds them, described by the config.
        hf_dir: folder with the config.json of a torch_dist checkpoint without one.

    Raises:
        ValueError: `path` is neither, or a broken checkpoint.
    """
    if not path.exists() or _holds_config_alone(path):
        hf_config, words = config_for_planning(path)
        facts = {"path": str(path), "format": "config alone", "config": words}
        return facts | _model(hf_config, None) | {"quantisation": hf_config.get("quantization_config")}
    found = find_checkpoint(path, hf_dir)
    facts = {"path": str(found.path), "format": found.format}
    stored = _stored_in_safetensors(found) if found.format == "huggingface" else _stored_in_torch_dist(found)
    if found.hf_dir is None:
        return facts | _unknown_model(f"{found.path} holds no config.json of its model; give one with --hf") | stored
    hf_config = found.hf_config()
    return facts | _model(hf_config, found) | {"quantisation": hf_config.get("quantization_config")} | stored


def _holds_config_alone(path: Path) -> bool:
    """Whether a folder has a config.json and no weights, in whichever format."""
    weights = (found for pattern in WEIGHTS for found in path.glob(pattern))
    return (path / "config.json").is_file() and not any(weights)


def _model(hf_config: dict[str, Any], found: FoundCheckpoint | None) -> dict[str, Any]:
    """Family, architecture and parameters: of the tensors found, or of those that the config implies."""
    try:
        family = family_of(hf_config)
        model, weight_map = family.megatron_config(hf_config), family.weight_map(hf_config, mtp=True)
    except ValueError as error:
        return _unknown_model(str(error)) | {"model_type": _model_type(hf_config)}
    shapes, left_out, carried = None, list[str](), None
    if found is not None:
        with open_found(found) as reader:
            shapes, left_out = {name: spec.shape for name, spec in reader.specs.items()}, list(reader.left_out)
            form = form_of(reader)
            carried = len(form.layout.carried) if isinstance(form, WrappedFolder) else None
    wrapper = wrapper_of(hf_config)
    return {
        "family": family.name,
        "model_type": _model_type(hf_config),
        "wrapper": None if wrapper is None else {"model_type": wrapper.model_type, "other_tensors": carried},
        "architecture": _architecture(model) | {"MTP layers": num_mtp_layers(hf_config)},
        "parameters": _parameters(weight_map, model, shapes),
        "tensors": None if shapes is None else _mismatches(weight_map, shapes, left_out),
    }


def _model_type(hf_config: dict[str, Any]) -> str | None:
    """`model_type` as config.json has it, outermost."""
    return hf_config.get(WRAPPED_IN, hf_config).get("model_type")


def _unknown_model(reason: str) -> dict[str, Any]:
    return {"family": None, "reason": reason, "architecture": None, "parameters": None, "tensors": None}


def _architecture(model: MegatronModelConfig) -> dict[str, Any]:
    facts = {shown: model.transformer.get(name) for shown, name in ARCHITECTURE.items()}
    sparse = model.transformer.get("moe_layer_freq")
    if sparse and all(sparse):
        # All layers have experts.
        del facts["dense MLP width"]
    return {
        **{shown: value for shown, value in facts.items() if value is not None},
        **({"layers with experts": sum(sparse)} if sparse else {}),
        "vocabulary": model.vocab_size,
        "tied embeddings": model.tie_embeddings,
        "rotary base": model.rotary_base,
        "longest position": model.max_position,
    }


def _parameters(
    weight_map: WeightMap, model: MegatronModelConfig, shapes: Mapping[str, tuple[int, ...]] | None
) -> dict[str, Any]:
    counts = {count.part: count for count in count_parameters(weight_map, model, shapes)}
    active = sum(count.active for count in counts.values())
    outer = sum(counts[part].active for part in ("embedding", "head") if part in counts)
    mtp = counts["MTP"].total if "MTP" in counts else 0
    return {
        "total": sum(count.total for count in counts.values()) - mtp,
        "active": active,
        "active_without_embedding_and_head": active - outer,
        "mtp": mtp,
        "parts": {part: {"total": count.total, "active": count.active} for part, count in counts.items()},
    }


def _mismatches(weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]], left_out: list[str]) -> dict[str, Any]:
    found = find_mismatches(weight_map, shapes)
    kinds = {"missing": found.missing, "unknown": found.unknown, "misshaped": list(found.misshaped)}
    kinds["left out"] = left_out
    return {
        "found": len(shapes),
        "hint": found.fused_line,
        **{kind: {"count": len(names), "first": names[:MAX_NAMED]} for kind, names in kinds.items()},
    }


def _stored_in_safetensors(found: FoundCheckpoint) -> dict[str, Any]:
    """Files, bytes and dtypes as they are on disk, with the scales of quantised weights."""
    with SafetensorsFolder(found.path) as folder:
        tensors = [(spec.dtype, spec_bytes(spec)) for spec in folder.specs.values()]
    return {"storage": _storage(sorted(found.path.glob("*.safetensors")), tensors)}


def _stored_in_torch_dist(found: FoundCheckpoint) -> dict[str, Any]:
    """The same for torch_dist, with the optimizer state's size and the layout that saved it."""
    tensors, optimizer_bytes, num_chunks = list[tuple[str, int]](), 0, 0
    for key, entry in read_metadata(found.path).state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        dtype = entry.properties.dtype
        size = entry.size.numel() * dtype.itemsize
        if key.startswith("optimizer."):
            optimizer_bytes += size
        else:
            tensors.append((str(dtype).removeprefix("torch."), size))
            num_chunks += len(entry.chunks)
    facts = read_facts(found.path) if (found.path / FACTS_FILE).is_file() else {}
    return {
        "storage": _storage(sorted(found.path.glob("*.distcp")), tensors),
        "torch_dist": {
            "saved_under": facts.get("layout"),
            "weight_chunks": num_chunks,
            "optimizer_bytes": optimizer_bytes,
        },
    }


def _storage(files: list[Path], tensors: list[tuple[str, int]]) -> dict[str, Any]:
    """`tensors`: (dtype, bytes) of each."""
    sizes: dict[str, list[int]] = {}
    for dtype, size in sorted(tensors):
        sizes.setdefault(dtype, []).append(size)
    return {
        "files": len(files),
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "dtypes": {dtype: {"tensors": len(held), "bytes": sum(held)} for dtype, held in sizes.items()},
    }
