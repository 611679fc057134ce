"""How an engine process loads a bucket: out of memory shared with a trainer on its node, or from a broadcast.

/update_weights_from_tensor with load_format "flattened_bucket" carries any pickled dictionary to
WeightUpdater._update_weights_from_flattened_bucket; the hook here takes the dictionaries that `bucket_payload`
makes and leaves the others to SGLang. The engine maps the buffer and loads views of it: nothing is copied
besides the copy into the parameters.
The buffer is a file in /dev/shm (CPU), or device memory behind a CUDA IPC handle (GPU).

/update_weights_from_distributed receives one flat tensor of bytes per bucket, which SGLang takes for a tensor whose
name is the bucket's description (`bucket_name`); the hook after the receipt takes it apart.
"""

import base64
import json
import mmap
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.data.protocols import BucketSpec

if TYPE_CHECKING:
    from torch import Tensor

CUDA_PREFIX = "cuda-ipc:"
"""Before the base64 of the pickled arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor."""
_KEY = "slimrl_segment"
_NAME_PREFIX = "slimrl-bucket:"


def bucket_payload(segment: str, bucket: BucketSpec) -> str:
    """The one element of `serialized_named_tensors`: base64 of a pickle of plain values, the same for every rank."""
    value = {_KEY: segment, "nbytes": bucket.nbytes, "tensors": _layout(bucket)}
    return base64.b64encode(pickle.dumps(value)).decode()


def bucket_name(bucket: BucketSpec) -> str:
    """The name under which the bucket's bytes are broadcast; it describes what is in them."""
    return _NAME_PREFIX + json.dumps(_layout(bucket))


def _layout(bucket: BucketSpec) -> list[list[Any]]:
    return [
        [spec.name, list(spec.shape), spec.dtype, offset]
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True)
    ]


def around_update(
    original: Callable[..., tuple[bool, str]], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
) -> tuple[bool, str]:
    """Hook of WeightUpdater._update_weights_from_flattened_bucket; (success, message)."""
    value = flattened_tensor_bucket_dict
    if _KEY not in value:
        return original(updater, value)
    import torch

    with_device = value[_KEY].startswith(CUDA_PREFIX)
    buffer = _open_cuda(value[_KEY]) if with_device else _open_shared(value[_KEY], value["nbytes"])
    updater.get_model().load_weights(_views(buffer, value["tensors"]))
    if with_device:
        # The trainer reuses the buffer after our answer; the copies must have run by then.
        torch.cuda.synchronize()
    return True, "Success"


def after_receive(weights: "list[tuple[str, Tensor]]", updater: Any, **kwargs: Any) -> "list[tuple[str, Tensor]]":
    """Hook of WeightUpdater.receive_weights_from_distributed: the tensors in the buckets that were received."""
    tensors = []
    for name, tensor in weights:
        if name.startswith(_NAME_PREFIX):
            tensors += _views(tensor, json.loads(name.removeprefix(_NAME_PREFIX)))
        else:
            tensors.append((name, tensor))
    return tensors


def _views(buffer: "Tensor", tensors: list[list[Any]]) -> "list[tuple[str, Tensor]]":
    import torch

    views = []
    for name, shape, dtype_name, offset in tensors:
        dtype = getattr(torch, dtype_name)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        views.append((name, buffer[offset : offset + nbytes].view(dtype).view(shape)))
    return views


def _open_shared(segment: str, nbytes: int) -> "Tensor":
    """uint8 [nbytes]; the mapping lives as long as the tensor."""
    import torch

    with (Path("/dev/shm") / segment).open("rb") as file:
        # A private mapping: torch wants writable memory, and no write may reach the trainer's buffer.
        mapping = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _open_cuda(segment: str) -> "Tensor":
    """uint8 [nbytes] on the device of the trainer's buffer."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = pickle.loads(base64.b64decode(segment.removeprefix(CUDA_PREFIX)))
    return rebuild_cuda_tensor(*arguments)
