"""How an engine process gets weights: out of trainers' shared memory, or through a group of peers.

/update_weights_from_tensor with load_format "flattened_bucket" carries any pickled dictionary to
WeightUpdater._update_weights_from_flattened_bucket in every rank of the engine. The hook here handles the dictionaries
that the functions below make and leaves others to SGLang.
A draft model gets its weights in the same way (`selector` of the request), through the plan of the whole process.
"""

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slimrl.data.model_weights import EngineModel, GroupSpec

if TYPE_CHECKING:
    from torch import Tensor

    from slimrl.engines.plugin.engine_ranks import EngineRanks
    from slimrl.engines.plugin.peer_receiver import PeerReceiver
    from slimrl.engines.plugin.shared_rounds import SharedRounds

_MAP = "slimrl_map_memory"
_LOAD = "slimrl_load_round"
_JOIN = "slimrl_join_group"
_RECEIVE = "slimrl_receive_version"
_PLACED = "slimrl_placed_weights"
"""Attribute of the engine's model: whether this update has written weights without SGLang's own loading."""
_REGIONS = "slimrl_kept_regions"
"""The same: what this process keeps of each tensor, found once for an update."""
_RECEIVER = "slimrl_receiver"
"""Attribute of the tensor-parallel group, kept by the process for all of its models: PeerReceiver."""
_SHARED = "slimrl_shared_rounds"
"""The same: SharedRounds"""


def map_payload(rounds: dict[str, list[Any]], segments: Mapping[int, Sequence[str]]) -> str:
    """The message that gives one rank of the engine its part of the plan of the trainer's slots.

    Args:
        rounds, segments: see SharedRounds.
    """
    return _payload({_MAP: rounds, "segments": {rank: list(each) for rank, each in segments.items()}})


def load_payload(model: EngineModel, slot: int, number: int) -> str:
    """The message that tells all ranks of the engine to load a round of one model.

    Args:
        slot: number of the slot in which it lies.
    """
    return _payload({_LOAD: number, "model": model.value, "slot": slot})


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


def around_update(
    original: Callable[..., tuple[bool, str]], updater: Any, flattened_tensor_bucket_dict: dict[str, Any]
) -> tuple[bool, str]:
    """Hook of WeightUpdater._update_weights_from_flattened_bucket."""
    from slimrl.engines.plugin.engine_ranks import EngineRanks

    value = flattened_tensor_bucket_dict
    if not value.keys() & {_MAP, _LOAD, _JOIN, _RECEIVE}:
        return original(updater, value)
    return update(updater.get_model(), value, EngineRanks())


def update(model: Any, value: dict[str, Any], ranks: "EngineRanks") -> tuple[bool, str]:
    """Handle the trainer's message as one rank of an engine; (success, message) of all ranks together.

    The message of a version that was received is a JSON list, the bytes that came to each rank.
    """
    from slimrl import device
    from slimrl.engines.plugin.shared_rounds import SharedRounds
    from slimrl.resync.p2p.peer_group import GroupError

    problem = ""
    try:
        if _JOIN in value:
            _join_group(value, ranks)
        elif _RECEIVE in value:
            _receive(model, value, ranks)
        elif _MAP in value:
            # One that cannot be followed leaves the plan before it.
            shared = SharedRounds(value[_MAP], value["segments"])
            leave_group(ranks)
            ranks.kept[_SHARED] = shared
        else:
            _load(model, value, ranks)
    except (OSError, ValueError, RuntimeError, LookupError, AssertionError, GroupError) as error:
        # SGLang would end the whole engine; report it to the trainer instead.
        problem = f"{type(error).__name__}: {error}"
    # After our answer the trainer writes the slots again, so the copies must have run.
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
    vars(model)[_PLACED] = True
    receiver.receive(value["model"], value["version"], kept_regions(model))


def _load(model: Any, value: dict[str, Any], ranks: "EngineRanks") -> None:
    from slimrl.engines.plugin.kept_tensors import kept_regions

    shared: SharedRounds | None = ranks.kept.get(_SHARED)
    if shared is None:
        raise ValueError("this process has no plan of the trainer's slots")
    vars(model)[_PLACED] = True
    if _REGIONS not in vars(model):
        # Of this update: parameters may lie elsewhere in the next one.
        vars(model)[_REGIONS] = kept_regions(model)
    shared.load(value["model"], value[_LOAD], value["slot"], vars(model)[_REGIONS])


def leave_group(ranks: "EngineRanks") -> None:
    """Leave the trainer's group, if this process is in one, and its slots."""
    ranks.kept.pop(_SHARED, None)
    receiver: PeerReceiver | None = ranks.kept.pop(_RECEIVER, None)
    if receiver is not None:
        receiver.close()


def around_end_update(original: Callable[..., None], updater: Any, *, run_post_load: bool) -> None:
    """Hook of WeightUpdater.end_weight_update.

    A model may compute with tensors derived from its weights (w_kc and w_vc of latent attention from kv_b_proj). Its
    load_weights derives them again; after weights that came in another way SGLang is told to do so here.
    """
    model = vars(updater.get_model())
    model.pop(_REGIONS, None)
    original(updater, run_post_load=run_post_load or model.pop(_PLACED, False))


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
