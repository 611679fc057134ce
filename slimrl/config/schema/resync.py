"""The resync of weights from the trainer to the engines."""

from dataclasses import dataclass
from enum import Enum

from slimrl.config.schema.types import FilePath, Flag, PositiveFloat, PositiveInt


class TransportName(str, Enum):
    ipc = "ipc"
    """To engines on the trainer's nodes: CUDA IPC on a GPU, named shared memory on a CPU, and between nodes messages of
    the trainer's ranks."""
    p2p = "p2p"
    """Across nodes: NCCL or gloo, from every trainer rank to the engine ranks that keep what it holds."""
    disk = "disk"
    """A shared file system: a Hugging Face checkpoint of each version, which engines reload."""
    delta = "delta"
    """A shared file system: changes since the last version, applied to a copy on the engine's node."""


class DeltaEncoding(str, Enum):
    """Encoding of a changed tensor; slimrl/checkpoints/versions/codec.py has the formats."""

    xor = "xor"
    """Exclusive or of old and new bits: smallest if most elements change, as in fp32."""
    overwrite = "overwrite"
    """Positions and new values of changed elements: fastest if few elements change, as in bf16."""


class PauseMode(str, Enum):
    """Treatment of running requests when the weights change."""

    retract = "retract"
    """Requests return to the queue, and their KV cache is computed again with the new weights."""
    abort = "abort"
    """Requests end, and their turns go on after the pause in further requests, with the tokens that they have."""
    in_place = "in_place"
    """Requests continue with the KV cache of the old weights and are counted as stale."""


class VerifyMode(str, Enum):
    off = "off"
    """No comparison."""
    sampled = "sampled"
    """Some tensors at each resync, all of them in turn."""
    full = "full"
    """Every tensor at each resync."""


@dataclass(kw_only=True)
class ResyncConfig:
    transport: TransportName = TransportName.ipc
    """Transport of weights to the engines; docs/resync.md compares them."""
    bucket_bytes: PositiveInt = 256 * 1024**2
    """The most bytes that are sent at a time; docs/resync.md says which buffers have this size."""
    verify: VerifyMode = VerifyMode.sampled
    """Comparison of fingerprints of the engines' loaded tensors with the trainer's after each resync."""
    sampled_versions: PositiveInt = 50
    """Resyncs in which `sampled` compares every tensor once."""
    sampled_bytes: PositiveInt = 16 * 1024**2
    """Minimum size of a sample; a model of less than twice this is compared whole at each resync."""
    timeout_s: PositiveFloat = 300.0
    """Deadline of each call to an engine in a resync; with `p2p` of an attempt to send a version."""
    pause: PauseMode = PauseMode.retract
    """Treatment of running requests."""
    flush_cache: Flag = True
    """Empty the engines' prefix caches, which hold keys and values of the old weights. `false` keeps them for
    trajectories that go on after a resync, with pause abort or in_place; docs/resync.md."""
    dir: FilePath = ""
    """Folder for versions, at the same path for trainer and engines (disk, delta); empty for `resync` in the run
    folder."""
    keep: PositiveInt = 2
    """Newest versions kept in `dir`, besides those on which they build."""
    local_dir: FilePath = ""
    """Folder on a local disk of each node with engines, with room for one model per engine, and of the node of trainer
    rank 0, with room for one model (delta)."""
    full_every: PositiveInt = 20
    """Number of versions from one that is written whole to the next (delta)."""
    delta_encoding: DeltaEncoding = DeltaEncoding.overwrite
    """Encoding of a changed tensor (delta)."""
