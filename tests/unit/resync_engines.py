"""The weights of a trainer of one rank, and engines that live in this process, for tests of the resync."""

import threading
import time

import torch
from engine_ranks import OnlyRank

from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EngineModel, EnginePlace, SourcePiece, TensorSpec
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.peer_receiver import PeerReceiver, place
from slimrl.models.fingerprint import fingerprint
from slimrl.resync.ipc.shared_buffer import open_shared
from slimrl.resync.p2p.peer_group import GroupError
from slimrl.resync.session import ResyncSession


class Source:
    """Weights of a trainer of one rank."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.weights = tensors

    def layout(self):
        return {
            TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")): (
                SourcePiece(region=tuple(map(slice, [0] * t.ndim, t.shape)), holders=(0,)),
            )
            for name, t in self.weights.items()
        }

    def groups(self, name):
        return self.weights[name][None]


class Engine:
    """Keeps what it loads, and a log of what it was told.

    Args:
        keeps: the tensors that its model has; None for those of `weights`.
    """

    def __init__(self, name: str, keeps: dict[str, torch.Tensor] | None = None) -> None:
        self.name = name
        self.calls: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.version = -1
        self.fails_at: tuple[str, int] | None = None
        self.keeps = weights() if keeps is None else keeps
        self.drafts: tuple[str, ...] = ()
        self.cuts_rows = False
        self.receiver: PeerReceiver | None = None
        self.place = EnginePlace(name=name, nodes=("",))
        self.running = 0
        self.load_s = 0.0
        self.loading = threading.Lock()
        self._places = {}

    def probe(self, timeout_s):
        """Answers between two loads, as SGLang does."""
        if not self.loading.acquire(timeout=timeout_s):
            raise EngineError(f"{self.name}: no answer within {timeout_s:g} s")
        self.loading.release()

    def running_requests(self):
        return self.running

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fails_at is not None and (call, self.calls.count(call)) == self.fails_at:
            raise EngineError(f"{self.name}: {call}: refused")

    def pause(self, mode):
        self._note("pause")

    def begin_update(self):
        self._note("begin")
        self._places = {}

    def end_update(self):
        self._note("end")

    def flush_cache(self):
        self._note("flush")

    def set_version(self, version):
        self._note("version")
        self.version = version

    def resume(self):
        self._note("resume")

    def fingerprints(self, names):
        self._note("fingerprints")
        return {name: fingerprint(self.loaded[name]) for name in (self.loaded if names is None else names)}

    def map_memory(self, segments, rounds):
        self._note("map")
        (self._loads,) = rounds
        self._segments = segments

    def load_round(self, model, number, slot):
        with self.loading:
            time.sleep(self.load_s)
            self._note("load")
            if model not in self._places:
                memory = {name: torch.zeros_like(value) for name, value in self.keeps.items()}
                regions = self._places[model] = self._regions(model, memory)
                self.loaded |= {name: memory[name] for name in regions}
            of_model = self._loads[model]
            for message, offset in of_model[number] if number < len(of_model) else ():
                memory = open_shared(self._segments[message.source][slot])
                place(message.entries, memory[offset:], self._places[model])

    def take(self, parts, flat):
        """Load a bucket."""
        self._note("load")
        for part in parts:
            whole = self.loaded.setdefault(
                part.spec.name, torch.zeros(part.spec.shape, dtype=getattr(torch, part.spec.dtype))
            )
            (whole[part.start : part.stop] if whole.ndim else whole).copy_(part.view(flat))

    def kept(self, model):
        self._note("kept")
        regions = self._regions(model, self.keeps)
        return [{name: [region.box for region in each] for name, each in regions.items()}]

    def join_group(self, group, rounds, fed):
        self._note("join")
        (only,) = rounds
        self.leave()
        self.receiver = PeerReceiver(group, OnlyRank(), {model.value: list(each) for model, each in only.items()}, fed)

    def leave(self) -> None:
        if self.receiver is not None:
            self.receiver.close()

    def receive(self, group, model, version):
        with self.loading:
            time.sleep(self.load_s)
            try:
                self._note("receive")
                assert self.receiver is not None
                assert self.receiver.name == group
                memory = {name: torch.zeros_like(value) for name, value in self.keeps.items()}
                regions = self._regions(model, memory)
                self.receiver.receive(model.value, version, regions)
            except (GroupError, EngineError, ValueError) as error:
                # As a rank of a real one leaves the group.
                self.leave()
                raise error if isinstance(error, EngineError) else EngineError(f"{self.name}: {error}") from error
            self.loaded |= {name: memory[name] for name in regions}
        return [self.receiver.received_bytes]

    def _regions(self, model, memory):
        """All of each tensor; or, for an engine that is unlike others, its first row and the others."""
        result = {}
        for name, value in memory.items():
            if (name in self.drafts) is (model is EngineModel.draft):
                box = tuple((0, size) for size in value.shape)
                cuts = [(0, 1), (1, len(value))] if self.cuts_rows and len(value) > 1 else [box[0]]
                result[name] = [KeptRegion((rows, *box[1:]), value[slice(*rows)]) for rows in cuts]
        return result


class MemoryTransport:
    """Brings buckets straight to the engines."""

    written_bytes = changed_fraction = None

    def begin(self, version, engines):
        self._engines = engines
        for engine in engines:
            engine.begin_update()

    def send(self, parts, buffer):
        for engine in self._engines:
            engine.take(parts, buffer.tensor)

    def end(self, version):
        for engine in self._engines:
            engine.end_update()

    def close(self):
        """Nothing is left to release."""


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (64,), (5, 5), (2, 2, 2), (33,), (1,)]
    return {
        f"w{i}": torch.randn(shape, generator=generator).to(torch.bfloat16 if i % 2 else torch.float32)
        for i, shape in enumerate(shapes)
    }


def config(**changes) -> ResyncConfig:
    return ResyncConfig(**{"bucket_bytes": 160, "timeout_s": 20.0, "verify": VerifyMode.full, **changes})


def session(source, engines, settings, **changes) -> ResyncSession:
    return ResyncSession(source, engines, settings, **{"rank": 0, "run_id": "test", **changes})
