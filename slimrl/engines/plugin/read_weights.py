"""Loads checkpoints that SGLang would read otherwise than an engine needs them, through slimrl's reader.

- In block FP8 or packed INT4, on a device that does not compute with it: plain weights, in the precision of the engine.
  SGLang is told that the model is not quantised.
- Of a wrapped model whose stacked experts have another order than the released ones: the text model's weights, one
  matrix for each expert, with its scales in block FP8.
- Of a model whose experts SGLang loads in stacks alone: a version of a resync, which holds each expert by itself, in
  stacks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def around_weights_iterator(original: Callable[..., Any], loader: Any, source: Any, **kwargs: Any) -> Any:
    """Hook of DefaultModelLoader._get_weights_iterator: (name, tensor) of everything in the checkpoint."""
    from slimrl import device
    from slimrl.checkpoints.hf_checkpoint import is_block_fp8, is_packed_int4

    path = Path(source.model_or_path)
    dequantize = not device.computes_block_fp8() and is_block_fp8(path)
    dequantize = dequantize or (device.device_type() != "cuda" and is_packed_int4(path))
    if dequantize:
        return _read(path, str(source.model_config.dtype).removeprefix("torch."), source.prefix)
    if _is_stacked_otherwise(path):
        return _read(path, None, source.prefix)
    if _is_apart(path):
        return _read_in_stacks(path, source.prefix)
    return original(loader, source, **kwargs)


def _is_stacked_otherwise(path: Path) -> bool:
    from slimrl.checkpoints.hf_checkpoint import open_stored
    from slimrl.checkpoints.wrapped_folder import WrappedFolder
    from slimrl.config.wrapper import wrapper_of
    from slimrl.models.hf_config import read_hf_config

    wrapper = wrapper_of(read_hf_config(path))
    if wrapper is None:
        return False
    with open_stored(path) as folder:
        return isinstance(folder, WrappedFolder) and folder.layout.stacking not in (None, wrapper.stacked)


def _read(path: Path, dtype: str | None, prefix: str) -> "Iterator[tuple[str, Tensor]]":
    """`dtype`: of dequantised matrices; None for the tensors as they are stored."""
    from slimrl.checkpoints.checkpoint_reader import read_whole
    from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored

    with open_hf_checkpoint(path, dtype) if dtype else open_stored(path) as folder:
        for name in folder.specs:
            yield prefix + name, read_whole(folder, name)


def _is_apart(path: Path) -> bool:
    from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
    from slimrl.config.hf_config import stacks_experts
    from slimrl.models.family import family_of
    from slimrl.models.hf_config import read_hf_config

    config = read_hf_config(path)
    if not stacks_experts(config):
        return False
    with SafetensorsFolder(path) as folder:
        return family_of(config).weight_map(config).stacked.keys() <= folder.specs.keys()


def _read_in_stacks(path: Path, prefix: str) -> "Iterator[tuple[str, Tensor]]":
    from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
    from slimrl.checkpoints.stacked_experts import read_each, stacks_of
    from slimrl.models.family import family_of
    from slimrl.models.hf_config import read_hf_config

    config = read_hf_config(path)
    with SafetensorsFolder(path) as folder:
        specs = list(folder.specs.values())
        stacks = stacks_of(family_of(config).weight_map(config))
        for name, tensor in stacks.stored_tensors(specs, read_each(folder, specs)):
            yield prefix + name, tensor
