"""How an engine process loads a bucket: out of memory shared with a trainer on its node, or from a broadcast.

/update_weights_from_tensor with load_format "flattened_bucket" carries any pickled dictionary to
WeightUpdater._update_weights_from_flattened_bucket; the hook here takes the dictionaries that `bucket_payload`
makes and leaves the others to SGLang. The engine loads views of the shared memory: nothing is copied besides the copy
into the parameters. A buffer stays mapped until the update ends.

/update_weights_from_distributed receives one flat tensor of bytes per bucket, which SGLang takes for a tensor whose
name is the bucket's description (`bucket_name`); the hook after the receipt takes it apart.
"""

import base64
import json
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slimrl.data.protocols import BucketSpec

if TYPE_CHECKING:
    from torch import Tensor

_KEY = "slimrl_segment"
_NAME_PREFIX = "slimrl-bucket:"
_MAPPED = "slimrl_mapped_segments"
"""Attribute of the engine's model: the shared memory that is mapped now, by the name of its segment."""


def bucket_payload(segment: str, bucket: BucketSpec) -> str:
    """The one element of `serialized_named_tensors`: base64 of a pickle of plain values, the same for every rank."""
    return base64.b64encode(pickle.dumps({_KEY: segment, "parts": _layout(bucket)})).decode()


def bucket_name(bucket: BucketSpec) -> str:
    """The name under which the bucket's bytes are broadcast; it describes what is in them."""
    return _NAME_PREFIX + json.dumps(_layout(bucket))


def _layout(bucket: BucketSpec) -> list[list[Any]]:
    return [
        [part.spec.name, list(part.spec.shape), part.spec.dtype, part.start, part.stop, part.offset]
        for part in bucket.parts
    ]


def around_update(
    original: Callable[..., tuple[bool, str]], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
) -> tuple[bool, str]:
    """Hook of WeightUpdater._update_weights_from_flattened_bucket; (success, message)."""
    value = flattened_tensor_bucket_dict
    if _KEY not in value:
        return original(updater, value)
    import torch

    model = updater.get_model()
    try:
        load_bucket(model, _mapped(model, value[_KEY]), value["parts"])
    except (OSError, ValueError, RuntimeError, KeyError, AssertionError) as error:
        # SGLang would end the whole engine; the trainer hears of it instead.
        return False, f"{type(error).__name__}: {error}"
    if torch.cuda.is_available():
        # The trainer reuses the buffer after our answer; the copies must have run by then.
        torch.cuda.synchronize()
    return True, "Success"


def after_end_update(result: None, updater: Any, **kwargs: Any) -> None:
    """Hook of WeightUpdater.end_weight_update: let go of the trainer's memory."""
    vars(updater.get_model()).pop(_MAPPED, None)


def after_receive(weights: "list[tuple[str, Tensor]]", updater: Any, **kwargs: Any) -> "list[tuple[str, Tensor]]":
    """Hook of WeightUpdater.receive_weights_from_distributed: the tensors in the buckets that were received."""
    tensors = []
    for name, tensor in weights:
        if name.startswith(_NAME_PREFIX):
            whole, rows = _views(tensor, json.loads(name.removeprefix(_NAME_PREFIX)))
            _load_rows(updater.get_model(), rows)
            tensors += whole
        else:
            tensors.append((name, tensor))
    return tensors


def load_bucket(model: Any, buffer: "Tensor", parts: list[list[Any]]) -> None:
    """Copy the bucket that lies at the start of `buffer` into the model's parameters."""
    whole, rows = _views(buffer, parts)
    if whole:
        model.load_weights(whole)
    _load_rows(model, rows)


def _load_rows(model: Any, rows: "list[tuple[str, int, Tensor]]") -> None:
    if rows:
        from slimrl.rollout.split_tensors import load_rows

        load_rows(model, rows)


def _views(
    buffer: "Tensor", parts: list[list[Any]]
) -> "tuple[list[tuple[str, Tensor]], list[tuple[str, int, Tensor]]]":
    """Whole tensors by name, and (name, first row, rows) of the others."""
    import torch

    whole, rows = [], []
    for name, shape, dtype_name, start, stop, offset in parts:
        dtype = getattr(torch, dtype_name)
        is_whole = not shape or stop - start == shape[0]
        part_shape = shape if is_whole else [stop - start, *shape[1:]]
        nbytes = torch.Size(part_shape).numel() * dtype.itemsize
        view = buffer[offset : offset + nbytes].view(dtype).view(part_shape)
        if is_whole:
            whole.append((name, view))
        else:
            rows.append((name, start, view))
    return whole, rows


def _mapped(model: Any, segment: str) -> "Tensor":
    from slimrl.models.shared_segment import open_shared

    mapped = vars(model).setdefault(_MAPPED, {})
    if segment not in mapped:
        mapped[segment] = open_shared(segment)
    return mapped[segment]
