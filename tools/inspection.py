"""What a checkpoint is, read from its config and headers alone: no tensor is touched.

A checkpoint whose family is not supported is described by its files; the model's part then says why it is missing.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl_tools.open_checkpoint import FoundCheckpoint, find_checkpoint, open_found
from slimrl_tools.parameters import count_parameters
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slimrl.models.architecture import FACTS_FILE, read_facts
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config, published_names
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.mtp import num_mtp_layers
from slimrl.models.safetensors_folder import SafetensorsFolder, spec_bytes
from slimrl.models.torch_dist_reader import read_metadata
from slimrl.models.weight_map import WeightMap

MAX_NAMED = 5
"""Missing or unknown tensors that are named; the rest are counted."""

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
"""What is shown, and where the family's Megatron config has it."""


def inspect_checkpoint(path: Path, hf_dir: Path | None = None) -> dict[str, Any]:
    """Facts of a checkpoint as JSON values.

    Args:
        path: a checkpoint in any format, or the name of a published model, which is then described by its config.
        hf_dir: folder with the config.json of a torch_dist checkpoint that has none of its own.

    Raises:
        ValueError: `path` is neither, or a broken checkpoint.
    """
    if not path.exists() and str(path) in published_names():
        return {"path": str(path), "format": "config alone", **_model(published_config(str(path)), None)}
    found = find_checkpoint(path, hf_dir)
    facts = {"path": str(found.path), "format": found.format}
    stored = _stored_in_safetensors(found) if found.format == "huggingface" else _stored_in_torch_dist(found)
    if found.hf_dir is None:
        return facts | _unknown_model(f"{found.path} holds no config.json of its model; give one with --hf") | stored
    hf_config = found.hf_config()
    return facts | _model(hf_config, found) | {"quantisation": hf_config.get("quantization_config")} | stored


def _model(hf_config: dict[str, Any], found: FoundCheckpoint | None) -> dict[str, Any]:
    """Family, architecture and parameters: of the tensors that are there, or of all that the config implies."""
    try:
        family = family_of(hf_config)
        model, weight_map = family.megatron_config(hf_config), family.weight_map(hf_config, mtp=True)
    except ValueError as error:
        return _unknown_model(str(error))
    shapes = None
    if found is not None:
        with open_found(found) as reader:
            shapes = {name: spec.shape for name, spec in reader.specs.items()}
    return {
        "family": family.name,
        "architecture": _architecture(model) | {"MTP layers": num_mtp_layers(hf_config)},
        "parameters": _parameters(weight_map, model, shapes),
        "tensors": None if shapes is None else _tensors(weight_map, shapes),
    }


def _unknown_model(reason: str) -> dict[str, Any]:
    return {"family": None, "reason": reason, "architecture": None, "parameters": None, "tensors": None}


def _architecture(model: MegatronModelConfig) -> dict[str, Any]:
    facts = {shown: model.transformer.get(name) for shown, name in ARCHITECTURE.items()}
    sparse = model.transformer.get("moe_layer_freq")
    return {
        **{shown: value for shown, value in facts.items() if value is not None},
        **({"layers with experts": sum(sparse)} if isinstance(sparse, list) else {}),
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


def _tensors(weight_map: WeightMap, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """How the tensors that are there differ from those that the config implies; all MTP layers may be left out."""
    has_mtp = any(tensor.name in shapes for entry in weight_map.entries if entry.rule.mtp for tensor in entry.hf)
    expected = [tensor for entry in weight_map.entries if has_mtp or not entry.rule.mtp for tensor in entry.hf]
    known = {name: tensor.shape for tensor in expected for name in tensor.names}
    differences = {
        "missing": [tensor.name for tensor in expected if tensor.name not in shapes],
        "unknown": [name for name in shapes if name not in known],
        "misshaped": [name for name, shape in known.items() if name in shapes and shapes[name] != shape],
    }
    return {
        "found": len(shapes),
        **{kind: {"count": len(names), "first": names[:MAX_NAMED]} for kind, names in differences.items()},
    }


def _stored_in_safetensors(found: FoundCheckpoint) -> dict[str, Any]:
    """Files, bytes and element types as they are on disk, scales of quantised weights among them."""
    with SafetensorsFolder(found.path) as folder:
        specs = list(folder.specs.values())
    tensors, nbytes = Counter(spec.dtype for spec in specs), Counter[str]()
    for spec in specs:
        nbytes[spec.dtype] += spec_bytes(spec)
    files = sorted(found.path.glob("*.safetensors"))
    return {"storage": _storage(files, tensors, nbytes)}


def _stored_in_torch_dist(found: FoundCheckpoint) -> dict[str, Any]:
    """The same of megatron-core's format, and what else than weights is in it, and the layout that saved it."""
    metadata = read_metadata(found.path).state_dict_metadata
    tensors, nbytes, optimizer_bytes, pieces = Counter[str](), Counter[str](), 0, 0
    for key, entry in metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        size = entry.size.numel() * entry.properties.dtype.itemsize
        if key.startswith("optimizer."):
            optimizer_bytes += size
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[dtype] += 1
        nbytes[dtype] += size
        pieces += len(entry.chunks)
    facts = read_facts(found.path) if (found.path / FACTS_FILE).is_file() else {}
    return {
        "storage": _storage(sorted(found.path.glob("*.distcp")), tensors, nbytes),
        "torch_dist": {
            "saved_under": facts.get("layout"),
            "weight_pieces": pieces,
            "optimizer_bytes": optimizer_bytes,
        },
    }


def _storage(files: list[Path], tensors: Counter[str], nbytes: Counter[str]) -> dict[str, Any]:
    return {
        "files": len(files),
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "dtypes": {dtype: {"tensors": tensors[dtype], "bytes": nbytes[dtype]} for dtype in sorted(tensors)},
    }
