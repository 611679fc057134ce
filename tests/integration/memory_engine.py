"""An engine that lives in a trainer rank's process: it maps the shared memory and keeps what it is given."""

import time

import torch

from slimrl.data.model_weights import EnginePlace
from slimrl.models.fingerprint import fingerprint
from slimrl.resync.ipc.shared_buffer import open_shared


class MemoryEngine:
    """Implements the part of EngineControl that `ipc` uses."""

    def __init__(self, name: str, node: str) -> None:
        self.name = name
        self.place = EnginePlace(name=name, nodes=(node,))
        self.loaded: dict[str, torch.Tensor] = {}
        self.version, self.serves = -1, True
        self.flush_s = 0.0

    def probe(self, timeout_s):
        """Alive."""

    def pause(self, mode):
        self.serves = False

    def begin_update(self):
        self.loaded = {}

    def load_shared_bucket(self, segment, parts):
        flat = open_shared(segment)
        for part in parts:
            value = part.view(flat).clone()
            if part.is_whole:
                self.loaded[part.spec.name] = value
            else:
                whole = self.loaded.setdefault(part.spec.name, value.new_empty(part.spec.shape))
                whole[part.start : part.stop] = value

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
