"""An engine in a process of its own, without SGLang: it loads rounds, and receives, by the plugin's own `update`.

The trainer's rank talks to it over a socket, whose path is their meeting point.
"""

import base64
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_ranks import OnlyRank
from machine import spin

from slimrl import device
from slimrl.data.boxes import Box
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EngineModel, EnginePlace, GroupSpec
from slimrl.data.peer_messages import Placed, Round
from slimrl.engines.plugin import kept_tensors, weight_updates
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.peer_receiver import plain_rounds
from slimrl.engines.plugin.shared_rounds import plain_loads
from slimrl.models.fingerprint import fingerprint

Rounds = Mapping[EngineModel, Sequence[Sequence[Placed]]]

START_S = 120.0
"""In which a process begins to listen."""


class Weights:
    """Stands for SGLang's model: parameters by name, found after a while if that is asked for."""

    config = SimpleNamespace()

    def __init__(self, load_s: float = 0.0) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self._load_s = load_s

    def regions(self) -> dict[str, list[KeptRegion]]:
        """Takes the place of `kept_regions`: the whole of each tensor."""
        if self._load_s:
            spin(self._load_s)
        return {
            name: [KeptRegion(tuple((0, size) for size in value.shape), value)] for name, value in self.loaded.items()
        }


class Served:
    """What the process answers; each method has the name of the request."""

    def __init__(self, load_s: float) -> None:
        self.model = Weights(load_s)
        self._ranks = OnlyRank()
        self._updater = SimpleNamespace(get_model=lambda: self.model)
        self._segments: set[str] = set()

    def pid(self) -> int:
        return os.getpid()

    def map_memory(self, segments: Mapping[int, Sequence[str]], rounds: Sequence[Rounds]) -> None:
        self._segments.update(segment for each in segments.values() for segment in each)
        (only,) = rounds
        self._update(weight_updates.map_payload(plain_loads(only), segments))

    def load_round(self, model: EngineModel, number: int, slot: int) -> None:
        self._update(weight_updates.load_payload(model, slot, number))

    def keep(self, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Have parameters of these shapes and dtypes."""
        for name, (shape, dtype) in tensors.items():
            self.model.loaded[name] = torch.zeros(shape, dtype=dtype, device=device.compute_device())

    def kept(self, model: EngineModel) -> list[dict[str, list[Box]]]:
        return [{name: [tuple((0, size) for size in value.shape)] for name, value in self.model.loaded.items()}]

    def join_group(
        self, group: GroupSpec, rounds: Sequence[Mapping[EngineModel, Sequence[Round]]], fed: GroupSpec | None
    ) -> None:
        (only,) = rounds
        plain = {model.value: plain_rounds(each) for model, each in only.items()}
        self._update(weight_updates.join_payload(group, plain, fed))

    def receive(self, group: str, model: EngineModel, version: int) -> list[int]:
        counts: list[int] = json.loads(self._update(weight_updates.receive_payload(group, model, version)))
        return counts

    def end_update(self) -> None:
        weight_updates.around_end_update(lambda *_, run_post_load: None, self._updater, run_post_load=False)

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        return {name: fingerprint(self.model.loaded[name]) for name in names or self.model.loaded}

    def value(self, name: str) -> np.ndarray:
        return self.model.loaded[name].float().cpu().numpy()

    def num_segments(self) -> int:
        """Different shared buffers that were loaded from."""
        return len(self._segments)

    def _update(self, payload: str) -> str:
        done, message = weight_updates.update(self.model, pickle.loads(base64.b64decode(payload)), self._ranks)
        if not done:
            raise EngineError(message)
        return message


def serve(path: Path, gpu: int = 0, load_s: float = 0.0) -> None:
    """Be the engine at `path` until the trainer goes.

    Args:
        gpu: of those that this process sees.
        load_s: for which each version's loading keeps the stream busy before it copies.
    """
    if device.device_type() == "cuda":
        torch.cuda.set_device(gpu)
        torch.zeros(1, device=device.compute_device())
    served = Served(load_s)
    kept_tensors.kept_regions = lambda model: model.regions()
    with Listener(str(path)) as listener, listener.accept() as connection:
        while True:
            try:
                name, arguments = connection.recv()
            except EOFError:
                return
            try:
                answer = None, getattr(served, name)(*arguments)
            except (EngineError, RuntimeError, KeyError) as error:
                answer = f"{type(error).__name__}: {error}", None
            connection.send(answer)


class RemoteEngine:
    """Implements EngineControl for the process at `path`."""

    def __init__(self, name: str, path: Path, *, timeout_s: float = 30.0) -> None:
        self.name, self.place, self._timeout_s = name, EnginePlace(name=name, nodes=("",)), timeout_s
        deadline = time.monotonic() + START_S
        while not path.exists():
            assert time.monotonic() < deadline, f"{name} has not started"
            time.sleep(0.02)
        self._connection = Client(str(path))
        self._one_call = threading.Lock()
        self.pid: int = self.ask("pid")

    def ask(self, request: str, *arguments: Any) -> Any:
        """The answer of Served; raises EngineError if the process is gone, late or refuses."""
        with self._one_call:
            try:
                self._connection.send((request, arguments))
                if not self._connection.poll(self._timeout_s):
                    raise EngineError(f"{self.name}: {request}: no answer within {self._timeout_s:g} s")
                problem, answer = self._connection.recv()
            except (EOFError, OSError) as error:
                raise EngineError(f"{self.name}: {request}: it is gone ({error})") from error
        if problem is not None:
            raise EngineError(f"{self.name}: {request}: {problem}")
        return answer

    def keep(self, weights: Mapping[str, torch.Tensor]) -> "RemoteEngine":
        """Have parameters like these weights."""
        self.ask("keep", {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()})
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._connection.close()

    def probe(self, timeout_s: float) -> None:
        self.ask("pid")

    def map_memory(self, segments: Mapping[int, Sequence[str]], rounds: Sequence[Rounds]) -> None:
        self.ask("map_memory", segments, rounds)

    def load_round(self, model: EngineModel, number: int, slot: int) -> None:
        self.ask("load_round", model, number, slot)

    def kept(self, model: EngineModel) -> list[dict[str, list[Box]]]:
        return self.ask("kept", model)

    def join_group(
        self, group: GroupSpec, rounds: Sequence[Mapping[EngineModel, Sequence[Round]]], fed: GroupSpec | None
    ) -> None:
        self.ask("join_group", group, rounds, fed)

    def receive(self, group: str, model: EngineModel, version: int) -> list[int]:
        return self.ask("receive", group, model, version)

    def end_update(self) -> None:
        self.ask("end_update")

    def fingerprints(self, names: list[str] | None) -> dict[str, str]:
        return self.ask("fingerprints", names)

    def running_requests(self) -> int:
        return 0

    def pause(self, mode: Any) -> None:
        """Nothing is generated here."""

    begin_update = flush_cache = resume = lambda self: None

    def set_version(self, version: int) -> None:
        """Nor does anything ask for it."""
