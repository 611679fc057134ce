"""How an engine that cannot compute with block FP8 loads a checkpoint in it: as the plain model that it dequantises to.

SGLang is told that the model is not quantised, and its reader of files is given tensors that our own reader has
dequantised, once, to the precision of the engine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def around_weights_iterator(original: Callable[..., Any], loader: Any, source: Any, **kwargs: Any) -> Any:
    """Hook of DefaultModelLoader._get_weights_iterator: (name, tensor) of everything in the checkpoint."""
    from slimrl.models.hf_checkpoint import is_block_fp8

    path = Path(source.model_or_path)
    if not is_block_fp8(path):
        return original(loader, source, **kwargs)
    return _dequantized(path, str(source.model_config.dtype).removeprefix("torch."), source.prefix)


def _dequantized(path: Path, dtype: str, prefix: str) -> "Iterator[tuple[str, Tensor]]":
    from slimrl.models.checkpoint_reader import read_whole
    from slimrl.models.hf_checkpoint import open_hf_checkpoint

    with open_hf_checkpoint(path, dtype) as folder:
        for name in folder.specs:
            yield prefix + name, read_whole(folder, name)
