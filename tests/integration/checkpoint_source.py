"""The weight source of a trainer that is no more than a checkpoint: for tests of what lies behind the gathering."""

from pathlib import Path

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.data.model_weights import SourcePiece


class CheckpointSource:
    """A plain checkpoint as the weights of a trainer of one rank."""

    def __init__(self, path: Path) -> None:
        with open_hf_checkpoint(path) as folder:
            self.specs = list(folder.specs.values())
            self.weights = {spec.name: read_whole(folder, spec.name) for spec in self.specs}

    def layout(self):
        return {
            spec: (SourcePiece(region=tuple(slice(0, size) for size in spec.shape), holders=(0,)),)
            for spec in self.specs
        }

    def groups(self, name):
        return self.weights[name][None]
