"""How an engine process loads a bucket: out of memory shared with a trainer on its node, or of a receiver's.

/update_weights_from_tensor with load_format "flattened_bucket" carries any pickled dictionary to
WeightUpdater._update_weights_from_flattened_bucket in every rank of the engine; the hook here takes the dictionaries
that the functions below make and leaves the others to SGLang. The engine loads views of the shared memory: nothing is
copied besides the copy into the parameters. A trainer's buffer stays mapped until the update ends.
"""

import base64
import pickle
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slimrl.data.protocols import BucketSpec, GroupSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slimrl.rollout.bucket_receiver import EngineRanks, EngineReceivers

_KEY = "slimrl_segment"
_OPEN = "slimrl_open_version"
_RECEIVED = "slimrl_received_bucket"
_MAPPED = "slimrl_mapped_segments"
"""Attribute of the engine's model: the shared memory that is mapped now, by the name of its segment."""
_USED = "slimrl_used_segments"
"""Attribute of the engine's model: those of them that this update has used."""
_SPLIT = "slimrl_split_tensors"
"""Attribute of the engine's model: this update has loaded rows of tensors beside SGLang's own loading."""
_RECEIVERS = "slimrl_receivers"
"""Attribute of the engine's model: EngineReceivers."""


def bucket_payload(segment: str, bucket: BucketSpec) -> str:
    """An element of `serialized_named_tensors`: base64 of a pickle of plain values, the same for every rank."""
    return _payload({_KEY: segment, "parts": _layout(bucket)})


def open_payload(group: GroupSpec, first_rank: int) -> str:
    """Tells the engine to take part in a version that comes by broadcast; see bucket_receiver.py."""
    return _payload({_OPEN: asdict(group), "first_rank": first_rank})


def received_payload(group: str, number: int, bucket: BucketSpec) -> str:
    """Tells the engine to load bucket `number` of the version that it receives."""
    return _payload({_RECEIVED: group, "number": number, "parts": _layout(bucket)})


def _payload(value: dict[str, Any]) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _layout(bucket: BucketSpec) -> list[list[Any]]:
    return [
        [part.spec.name, list(part.spec.shape), part.spec.dtype, part.start, part.stop, part.offset]
        for part in bucket.parts
    ]


def around_update(
    original: Callable[..., tuple[bool, str]], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
) -> tuple[bool, str]:
    """Hook of WeightUpdater._update_weights_from_flattened_bucket; (success, message) of all ranks together."""
    from slimrl.rollout.bucket_receiver import EngineRanks

    value = flattened_tensor_bucket_dict
    if not value.keys() & {_KEY, _OPEN, _RECEIVED}:
        return original(updater, value)
    return update(updater.get_model(), value, EngineRanks())


def update(model: Any, value: dict[str, Any], ranks: "EngineRanks") -> tuple[bool, str]:
    """Do what the trainer's message says, as one rank of an engine."""
    import torch

    from slimrl.models.broadcast_group import GroupError

    receivers = _receivers(model, ranks)
    problem = ""
    try:
        if _OPEN in value:
            receivers.open_version(GroupSpec(**value[_OPEN]), value["first_rank"], _places(model, ranks))
        elif _RECEIVED in value:
            buffer = receivers.bucket(value[_RECEIVED], value["number"])
            placed = receivers.placed(value["number"])
            load_bucket(model, buffer, [part for part in value["parts"] if part[0] not in placed])
        else:
            load_bucket(model, _mapped(model, value[_KEY]), value["parts"])
    except (OSError, ValueError, RuntimeError, KeyError, AssertionError, GroupError) as error:
        # SGLang would end the whole engine; the trainer hears of it instead.
        problem = f"{type(error).__name__}: {error}"
    if torch.cuda.is_available():
        # The buffer is written again after our answer; the copies must have run by then.
        torch.cuda.synchronize()
    # SGLang reports what became of rank 0 alone.
    problems = {rank: text for rank, text in enumerate(ranks.exchange(problem)) if text}
    if _RECEIVED in value:
        receivers.all_loaded(value["number"])
    return not problems, "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()) or "Success"


def around_destroy_group(original: Callable[..., tuple[bool, str]], updater: Any, group_name: str) -> tuple[bool, str]:
    """Hook of WeightUpdater.destroy_weights_update_group: leaves the group of a trainer's broadcasts."""
    from slimrl.models.broadcast_group import GroupError

    model = vars(updater.get_model())
    receivers: EngineReceivers | None = model.get(_RECEIVERS)
    if receivers is None:
        return original(updater, group_name)
    try:
        receivers.close()
    except GroupError as error:
        # It is kept: the next version must not begin before this one's broadcast has ended.
        return False, str(error)
    del model[_RECEIVERS]
    return True, "Success"


def _receivers(model: Any, ranks: "EngineRanks") -> "EngineReceivers":
    from slimrl.rollout.bucket_receiver import EngineReceivers

    return vars(model).setdefault(_RECEIVERS, EngineReceivers(ranks))  # type: ignore[no-any-return]


def around_end_update(original: Callable[..., None], updater: Any, *, run_post_load: bool) -> None:
    """Hook of WeightUpdater.end_weight_update: let go of shared memory that this update did not use.

    What a model computes with may be derived from its weights (w_kc and w_vc of latent attention from kv_b_proj). Its
    load_weights derives it anew, but not from rows that were copied without it; then SGLang is told to do so here.
    """
    model = vars(updater.get_model())
    original(updater, run_post_load=run_post_load or model.pop(_SPLIT, False))
    used = model.pop(_USED, set())
    model[_MAPPED] = {segment: mapping for segment, mapping in model.get(_MAPPED, {}).items() if segment in used}


def _places(model: Any, ranks: "EngineRanks") -> "dict[str, Tensor]":
    """Where this rank can receive tensors without a buffer, by name; nowhere if other ranks read its buffer."""
    from slimrl import device

    if not device.broadcasts_in_place() or ranks.per_node > 1:
        return {}
    from slimrl.rollout.expert_places import expert_places

    return expert_places(model)


def load_bucket(model: Any, buffer: "Tensor", parts: list[list[Any]]) -> None:
    """Copy the bucket that lies at the start of `buffer` into the model's parameters."""
    whole, rows = _views(buffer, parts)
    if whole:
        model.load_weights(whole)
    _load_rows(model, rows)


def _load_rows(model: Any, rows: "list[tuple[str, int, Tensor]]") -> None:
    if rows:
        from slimrl.rollout.split_tensors import load_rows

        vars(model)[_SPLIT] = True
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
    vars(model).setdefault(_USED, set()).add(segment)
    if segment not in mapped:
        mapped[segment] = open_shared(segment)
    return mapped[segment]
