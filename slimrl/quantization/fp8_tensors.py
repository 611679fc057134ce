"""The tensors of a checkpoint in block FP8 that are quantised: those that weight map and config both allow."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from slimrl.data.model_weights import TensorSpec
from slimrl.models.weight_map import WeightMap
from slimrl.quantization.fp8 import BlockFp8


def quantized_names(weight_map: WeightMap, fp8: BlockFp8) -> set[str]:
    """Hugging Face names of the tensors that are float8 under this config.

    Raises:
        ValueError: `modules_to_not_convert` names only some of the tensors that engines fuse (query, key and value;
            gate and up); or files hold all experts of a layer as one tensor.
    """
    if weight_map.stacked:
        raise ValueError("block FP8 is not supported for a model whose files hold all experts of a layer as one tensor")
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in weight_map.entries:
        if entry.rule.quantizable:
            groups[entry.fused_group or entry.megatron[0]] += [tensor.name for tensor in entry.hf if tensor.quantizable]
    for names in groups.values():
        kept = [name for name in names if not fp8.converts(name)]
        if kept and len(kept) < len(names):
            other = next(name for name in names if name not in kept)
            raise ValueError(
                f"modules not to convert: they name {_module(kept[0])} but not {_module(other)}; engines hold these as "
                "one matrix, so name both or neither"
            )
    return {name for names in groups.values() for name in names if fp8.converts(name)}


def check_modules(weight_map: WeightMap, names: Iterable[str]) -> None:
    """Raises ValueError: a name, read like those of `modules_to_not_convert`, matches no module of the model.

    For names that a user gives. The list of a checkpoint may name more: the head of a tied model, or layers for
    multi-token prediction that it lacks.
    """
    tensors = [name for tensor in weight_map.hf_tensors.values() for name in tensor.names]
    for name in names:
        alone = BlockFp8(not_converted=(name,))
        if all(alone.converts(tensor) for tensor in tensors):
            raise ValueError(
                f"modules not to convert: {name!r} is no module of this model; one is {_module(tensors[-1])!r}"
            )


def kept_modules(specs: Iterable[TensorSpec], quantized: Collection[str]) -> tuple[str, ...]:
    """Full names of all modules with a matrix that is not quantised, for `modules_to_not_convert`.

    Libraries match partial names differently, and some quantise every linear layer that is not named, the router and
    the output layer included. The routed experts of a layer are one module.
    """
    modules = (_module(spec.name) for spec in specs if len(spec.shape) == 2 and spec.name not in quantized)
    return tuple(dict.fromkeys(modules))


def quantized_specs(specs: Sequence[TensorSpec], quantized: Collection[str], fp8: BlockFp8) -> list[TensorSpec]:
    """The tensors of the quantised checkpoint, scales behind their matrices."""
    result: list[TensorSpec] = []
    for spec in specs:
        if spec.name in quantized:
            result += [fp8.quantized_spec(spec), fp8.scale_spec(spec)]
        else:
            result.append(spec)
    return result


def _module(tensor_name: str) -> str:
    before, experts, _ = tensor_name.partition(".experts.")
    return f"{before}.experts" if experts else tensor_name.rpartition(".")[0]
