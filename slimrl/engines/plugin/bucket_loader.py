"""How an engine process loads weights: a bucket from a trainer's shared memory, or a version through a group of peers.

/update_weights_from_tensor with load_format "flattened_bucket" carries any pickled dictionary to
WeightUpdater._update_weights_from_flattened_bucket in every rank of the engine. The hook here handles the dictionaries
that the functions below make and leaves others to SGLang. The engine loads views of the shared memory: the only copy is
that into the parameters. A trainer's buffer stays mapped until an update ends that did not use it.
A draft model gets its weights in the same way (`selector` of the request), through the group of the whole process.
"""

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slimrl.data.model_weights import EngineModel, GroupSpec, TensorPart, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slimrl.engines.plugin.engine_ranks import EngineRanks
    from slimrl.engines.plugin.peer_receiver import PeerReceiver
    from slimrl.models.engine_slice import EngineSlice

_KEY = "slimrl_segment"
_JOIN = "slimrl_join_group"
_RECEIVE = "slimrl_receive_version"
_MAPPED = "slimrl_mapped_segments"
"""Attribute of the engine's model: the mapped shared memory by segment."""
_USED = "slimrl_used_segments"
"""Attribute of the engine's model: the segments that this update has used."""
_SPLIT = "slimrl_split_tensors"
"""Attribute of the engine's model: whether this update has loaded rows of tensors without SGLang's own loading."""
_RECEIVER = "slimrl_receiver"
"""Attribute of the tensor-parallel group, kept by the process for all of its models: PeerReceiver."""


EXPERTS = ".experts."
"""Part of the names of experts' tensors."""


def bucket_payload(segment: str, parts: Sequence[TensorPart]) -> str:
    """An element of `serialized_named_tensors`: base64 of a pickle of plain values, the same for every rank."""
    return _payload({_KEY: segment, "parts": _plain(parts)})


def join_payload(group: GroupSpec, rounds: dict[str, list[Any]], fed: GroupSpec | None) -> str:
    """The message that gives one rank of the engine its group and its part of the plan.

    Args:
        rounds: of each model, as plain values; see peer_receiver.py.
        fed: the group of the engine that this one feeds.
    """
    return _payload({_JOIN: asdict(group), "rounds": rounds, "fed": asdict(fed) if fed else None})


def receive_payload(group: str, model: EngineModel, version: int) -> str:
    """The message that tells all ranks of the engine to receive a version of one model through the group."""
    return _payload({_RECEIVE: group, "model": model.value, "version": version})


def _payload(value: dict[str, Any]) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _plain(parts: Sequence[TensorPart]) -> list[dict[str, Any]]:
    """The parts as plain values: SGLang unpickles no class of ours."""
    return [{**vars(part), "spec": vars(part.spec)} for part in parts]


def _parts(plain: list[dict[str, Any]]) -> list[TensorPart]:
    """The parts from plain values, the inverse of `_plain`."""
    return [TensorPart(**{**part, "spec": TensorSpec(**part["spec"])}) for part in plain]


def around_update(
    original: Callable[..., tuple[bool, str]], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
) -> tuple[bool, str]:
    """Hook of WeightUpdater._update_weights_from_flattened_bucket."""
    from slimrl.engines.plugin.engine_ranks import EngineRanks

    value = flattened_tensor_bucket_dict
    if not value.keys() & {_KEY, _JOIN, _RECEIVE}:
        return original(updater, value)
    return update(updater.get_model(), value, EngineRanks())


def update(model: Any, value: dict[str, Any], ranks: "EngineRanks") -> tuple[bool, str]:
    """Handle the trainer's message as one rank of an engine; (success, message) of all ranks together.

    The message of a version that was received is a JSON list, the bytes that came to each rank.
    """
    from slimrl import device
    from slimrl.resync.p2p.peer_group import GroupError

    problem = ""
    try:
        if _JOIN in value:
            _join_group(value, ranks)
        elif _RECEIVE in value:
            _receive(model, value, ranks)
        else:
            load_bucket(model, _mapped(model, value[_KEY]), _parts(value["parts"]))
    except (OSError, ValueError, RuntimeError, KeyError, AssertionError, GroupError) as error:
        # SGLang would end the whole engine; report it to the trainer instead.
        problem = f"{type(error).__name__}: {error}"
    # After our answer the trainer writes the buffer again, so the copies must have run.
    device.finish_queued_work()
    receiver: PeerReceiver | None = ranks.kept.get(_RECEIVER)
    # SGLang reports the result of rank 0 alone.
    answers = ranks.exchange((problem, receiver.received_bytes if receiver else 0))
    problems = {rank: text for rank, (text, _) in enumerate(answers) if text}
    said = json.dumps([nbytes for _, nbytes in answers]) if _RECEIVE in value else "Success"
    return not problems, "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()) or said


def _join_group(value: dict[str, Any], ranks: "EngineRanks") -> None:
    """Keep a rank's plan; it joins with the first version, when the trainer ranks do."""
    from slimrl.engines.plugin.peer_receiver import PeerReceiver, parse_rounds

    leave_group(ranks)
    rounds = {model: parse_rounds(plain) for model, plain in value["rounds"].items()}
    fed = GroupSpec(**value["fed"]) if value["fed"] else None
    ranks.kept[_RECEIVER] = PeerReceiver(GroupSpec(**value[_JOIN]), ranks, rounds, fed)


def _receive(model: Any, value: dict[str, Any], ranks: "EngineRanks") -> None:
    from slimrl.engines.plugin.kept_tensors import kept_regions
    from slimrl.resync.p2p.peer_group import GroupError

    receiver: PeerReceiver | None = ranks.kept.get(_RECEIVER)
    if receiver is None or receiver.name != value[_RECEIVE]:
        raise GroupError(f"not in group {value[_RECEIVE]}")
    vars(model)[_SPLIT] = True
    receiver.receive(value["model"], value["version"], kept_regions(model))


def leave_group(ranks: "EngineRanks") -> None:
    """Leave the trainer's group, if this process is in one."""
    receiver: PeerReceiver | None = ranks.kept.pop(_RECEIVER, None)
    if receiver is not None:
        receiver.close()


def around_end_update(original: Callable[..., None], updater: Any, *, run_post_load: bool) -> None:
    """Hook of WeightUpdater.end_weight_update: unmaps shared memory that this update did not use.

    A model may compute with tensors derived from its weights (w_kc and w_vc of latent attention from kv_b_proj). Its
    load_weights derives them again, but load_rows does not; after that SGLang is told to do so here.
    """
    model = vars(updater.get_model())
    original(updater, run_post_load=run_post_load or model.pop(_SPLIT, False))
    used = model.pop(_USED, set())
    model[_MAPPED] = {segment: mapping for segment, mapping in model.get(_MAPPED, {}).items() if segment in used}


def load_bucket(model: Any, buffer: "Tensor", parts: Sequence[TensorPart]) -> None:
    """Copy the bucket that lies at the start of `buffer` into the model's parameters."""
    from slimrl.config.hf_config import stacks_experts

    # SGLang would load the experts of a layer at once, or none.
    apart = EXPERTS if stacks_experts({"model_type": getattr(model.config, "model_type", "")}) else None
    views = [(part, part.view(buffer), part.is_whole and not (apart and apart in part.spec.name)) for part in parts]
    if whole := [(part.spec.name, view) for part, view, loads in views if loads]:
        model.load_weights(whole)
    if rows := [(part, view) for part, view, loads in views if not loads]:
        vars(model)[_SPLIT] = True
        load_rows(model, rows)


def named_parameters(model: Any) -> "Iterator[tuple[str, Tensor]]":
    """An engine's parameters by the names that engine_layout.py knows, also those of a draft model or of a wrapped one.

    Those of a wrapped model's other modalities are left out.
    """
    from slimrl.config.wrapper import WRAPPERS
    from slimrl.models.draft import layer_name

    kind = type(model).__name__
    wrapper = next((wrapper for wrapper in WRAPPERS if wrapper.engine_class == kind), None)
    for name, parameter in model.named_parameters():
        if wrapper is None:
            yield layer_name(kind, model.config, name), parameter
        elif not name.startswith(wrapper.engine_carried):
            yield name.removeprefix(wrapper.engine_prefix), parameter


def _mapped(model: Any, segment: str) -> "Tensor":
    from slimrl.resync.ipc.shared_buffer import open_shared

    mapped = vars(model).setdefault(_MAPPED, {})
    vars(model).setdefault(_USED, set()).add(segment)
    if segment not in mapped:
        mapped[segment] = open_shared(segment)
    return mapped[segment]


def load_rows(model: Any, parts: "Sequence[tuple[TensorPart, Tensor]]") -> None:
    """Copy rows of tensors that are larger than a bucket into the parameters, as far as this process holds them.

    SGLang's own loading takes whole tensors alone. engine_layout.py says which parameter holds a Hugging Face tensor,
    and which shard of it this process has.

    Raises:
        ValueError: the engine's model has no such tensor.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    from slimrl.models.engine_layout import engine_slices
    from slimrl.models.engine_slice import EngineShape

    parallel = get_parallel()
    rank, num_ranks = parallel.tp_group.rank_in_group, parallel.tp_group.world_size
    shape = EngineShape.of_config(model.config, num_ranks, parallel.moe_ep_size, parallel.attn_dp_size)
    wanted = {part.spec.name for part, _ in parts}
    slices: dict[str, list[tuple[Tensor, EngineSlice]]] = {}
    for engine_name, parameter in named_parameters(model):
        for piece in engine_slices(engine_name, shape):
            if piece.hf_name in wanted:
                slices.setdefault(piece.hf_name, []).append((parameter, piece))
    with torch.no_grad():
        for part, rows in parts:
            if part.spec.name not in slices:
                raise ValueError(f"no such tensor in the engine's model: {part.spec.name}")
            for parameter, piece in slices[part.spec.name]:
                held = piece.holding(rank, num_ranks)
                if held is not None:
                    copy_rows(piece.of(parameter), rows, part.start - piece.first_row, piece.shard_dim, held.shard)


def copy_rows(shard: "Tensor", rows: "Tensor", start: int, shard_dim: int | None, index: int) -> None:
    """Copy some rows of the whole tensor into a shard, as far as it holds them.

    Args:
        shard: part `index` of equal parts along `shard_dim`, or the whole where it is None; padding may follow
            the whole's last row or column.
        rows: of the whole tensor, all columns, from row `start` on, which may lie before its first row.
    """
    if shard_dim == 1:
        columns = shard.shape[1]
        rows = rows[:, index * columns : (index + 1) * columns]
        shard = shard[:, : rows.shape[1]]
    first = index * shard.shape[0] if shard_dim == 0 else 0
    low, high = max(start, first), min(start + rows.shape[0], first + shard.shape[0])
    if low < high:
        shard[low - first : high - first].copy_(rows[low - start : high - start])
