"""The run: its folder, its checkpoints, where it is followed, and the limits that stop it."""

from dataclasses import dataclass, field
from enum import Enum

from slimrl.config.schema.types import (
    MISSING,
    CountOrAll,
    FileName,
    FilePath,
    Flag,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class WandbMode(str, Enum):
    offline = "offline"
    """Metrics are written into the run folder, for a later `wandb sync`."""
    online = "online"
    """Sent during the run, with the key in `WANDB_API_KEY` or of `wandb login`; without either, `offline`."""
    disabled = "disabled"
    """wandb is not used."""


class TrackerName(str, Enum):
    tensorboard = "tensorboard"
    """Event files in `<run folder>/tensorboard`."""
    mlflow = "mlflow"
    """A database in `<run folder>/mlflow`, or the server that `MLFLOW_TRACKING_URI` names."""


@dataclass(kw_only=True)
class RunConfig:
    name: FileName = MISSING
    """Name of the run; its folder is `<dir>/<name>`."""
    dir: FilePath = "runs"
    """Folder that holds the run folders."""
    max_restarts: NonNegativeInt = 3
    """How often the trainer is started anew in place after a rank has died or hangs, or its node is lost; one more
    within `restart_window_s` ends the run."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds after which a restart of the trainer counts no more."""


@dataclass(kw_only=True)
class CheckpointConfig:
    every_steps: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves only at the end."""
    in_memory_every_steps: NonNegativeInt = 0
    """Steps between copies in the memory of the trainer's nodes (/dev/shm), of which a trainer that is started anew in
    place takes the newest if no checkpoint on the disk is as new; 0 for none. docs/clusters.md#copies-in-memory says
    how much room they take."""
    grace_s: PositiveFloat = 60.0
    """Seconds after SIGUSR1 that a rollout may take; the run finishes and saves its step, but drops a rollout that
    takes longer."""
    keep: PositiveInt = 2
    """Number of newest checkpoints kept."""
    keep_every_steps: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are kept too; 0 for none."""
    export_every_steps: NonNegativeInt = 0
    """Steps between exports of the model as a Hugging Face checkpoint in `exports/` of the run's folder; 0 exports only
    at the end."""


@dataclass(kw_only=True)
class TrackingConfig:
    wandb: WandbMode = WandbMode.offline
    """How metrics reach wandb."""
    wandb_project: str = "slimrl"
    """wandb's project for the run."""
    more: list[TrackerName] = field(default_factory=list)
    """Trackers besides wandb that get the metrics; each needs the package of its name."""
    prometheus: str = ""
    """HOST:PORT at which the driver shows the last step's metrics to Prometheus, to whoever asks; empty for none."""
    opentelemetry: str = ""
    """URL of an OTLP endpoint, such as http://localhost:4318, that gets the spans of each step by HTTP; empty for none.
    """
    texts: Flag = False
    """Whether wandb and the others also get the readable trajectories of each step."""
    trajectories_per_step: NonNegativeInt = 4
    """Number of trajectories per step that are written as readable text."""
    recorded_trajectories_per_step: CountOrAll = 16
    """Number of trajectories per step that are recorded with their tokens, as Parquet: the first groups that are within
    it as a whole, and at least one; -1 records all, 0 none. As many of each evaluation set."""
    recorded_bytes: PositiveInt = 2_000_000_000
    """Bytes of all these files: where they are more, one of two steps is kept from then on, then one of four, and so
    on."""


@dataclass(kw_only=True)
class StopConfig:
    """Limits of a step's metrics: the run stops when a metric is beyond its limit in several steps in a row."""

    patience_steps: PositiveInt = 3
    """Steps in a row beyond a limit that stop the run; steps without an optimizer update do not count."""
    mismatch: PositiveFloat | None = None
    """Largest `mismatch/logprob_abs_mean`; `algorithm.max_logprob_mismatch` stops at the first step."""
    kl: PositiveFloat | None = None
    """Largest `policy/kl`."""
    entropy_min: PositiveFloat | None = None
    """Smallest `policy/entropy`."""
    entropy_max: PositiveFloat | None = None
    """Largest `policy/entropy`."""
    grad_norm: PositiveFloat | None = None
    """Largest `policy/grad_norm`."""
    effective_sample_size_min: PositiveFloat | None = None
    """Smallest `policy/effective_sample_size`."""
    rewind_not_finite: Flag = False
    """Where a loss, a gradient or weights that are not finite would end the run, it goes back to its newest checkpoint
    instead, or without one to its first step, once, and leaves out the prompts of the trajectories at fault from then
    on."""
