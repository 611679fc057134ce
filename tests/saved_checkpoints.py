"""Checkpoints of runs for tests, with parts that are files of a few bytes."""

from collections.abc import Callable, Mapping
from pathlib import Path

from slimrl.checkpoints.digests import FileDigest
from slimrl.config.schema.run import CheckpointConfig
from slimrl.runtime.checkpoint_writer import CheckpointWriter, WrittenAtOnce
from slimrl.runtime.state import CheckpointFolder, RunState


def save(
    folder: CheckpointFolder,
    state: RunState,
    keep: int,
    writers: Mapping[str, Callable[[Path], Mapping[str, FileDigest]]],
) -> None:
    """Save a checkpoint and wait for it."""
    writer = CheckpointWriter(folder, CheckpointConfig(keep=keep), lambda step: None)
    writer.begin(state, {name: WrittenAtOnce(write) for name, write in writers.items()})
    writer.finish()
