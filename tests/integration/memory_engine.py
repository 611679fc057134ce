"""An engine that lives in a trainer rank's process: it maps the shared memory and keeps every tensor whole."""

import time
from collections.abc import Iterable

import torch

from slimrl.data.model_weights import EnginePlace, TensorSpec
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.engines.plugin.peer_receiver import place
from slimrl.models.fingerprint import fingerprint
from slimrl.resync.ipc.shared_buffer import open_shared


class MemoryEngine:
    """Implements the part of EngineControl that `ipc` uses.

    Args:
        specs: of the tensors that its model has.
    """

    def __init__(self, name: str, node: str, specs: Iterable[TensorSpec] = ()) -> None:
        self.name = name
        self.place = EnginePlace(name=name, nodes=(node,))
        # Written, so that its memory is taken now.
        self.loaded = {s.name: torch.ones(s.shape, dtype=torch.uint8).to(getattr(torch, s.dtype)) for s in specs}
        self.regions = {
            name: [KeptRegion(tuple((0, size) for size in value.shape), value)] for name, value in self.loaded.items()
        }
        self.seen = 0
        """Bytes that came in the last version"""
        self.version, self.serves = -1, True
        self.flush_s = 0.0

    def probe(self, timeout_s):
        """Alive."""

    def pause(self, mode):
        self.serves = False

    def begin_update(self):
        self.seen = 0

    def kept(self, model):
        return [{name: [region.box for region in regions] for name, regions in self.regions.items()}]

    def map_memory(self, segments, rounds):
        (self._loads,) = rounds
        self._slots = {rank: [open_shared(segment) for segment in each] for rank, each in segments.items()}

    def load_round(self, model, number, slot):
        with torch.no_grad():
            of_model = self._loads[model]
            for message, offset in of_model[number] if number < len(of_model) else ():
                place(message.entries, self._slots[message.source][slot][offset:], self.regions)
                self.seen += message.nbytes

    def end_update(self):
        """Nothing is left to do."""

    def flush_cache(self):
        time.sleep(self.flush_s)

    def set_version(self, version):
        self.version = version

    def resume(self):
        self.serves = True

    def fingerprints(self, names):
        return {name: fingerprint(self.loaded[name]) for name in names or self.loaded}
