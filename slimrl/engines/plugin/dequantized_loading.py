"""Loads a checkpoint in block FP8 as a plain model, for an engine that cannot compute with FP8.

SGLang is told that the model is not quantised. In place of its own reader of files it gets tensors that slimrl's reader
has dequantised to the precision of the engine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def around_weights_iterator(original: Callable[..., Any], loader: Any, source: Any, **kwargs: Any) -> Any:
    """Hook of DefaultModelLoader._get_weights_iterator: (name, tensor) of everything in the checkpoint."""
    from slimrl.checkpoints.hf_checkpoint import is_block_fp8

    path = Path(source.model_or_path)
    if not is_block_fp8(path):
        return original(loader, source, **kwargs)
    return _dequantized(path, str(source.model_config.dtype).removeprefix("torch."), source.prefix)


def _dequantized(path: Path, dtype: str, prefix: str) -> "Iterator[tuple[str, Tensor]]":
    from slimrl.checkpoints.checkpoint_reader import read_whole
    from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint

    with open_hf_checkpoint(path, dtype) as folder:
        for name in folder.specs:
            yield prefix + name, read_whole(folder, name)
