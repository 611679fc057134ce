"""The state of a run that is not in the trainer's checkpoint, and the folder that holds both.

A checkpoint is the folder `checkpoints/step_000010` with `trainer/` (Megatron's sharded checkpoint), with a critic
`critic/` (the same), and `state.json`, which also has the size and checksum of every other file and of itself
(checkpoint_check.py compares them).
It is written under a hidden name and renamed when complete, so a folder with the final name is complete.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from slimrl.base.errors import NotFinite, RunError, StageError, TrainerLost
from slimrl.checkpoints.digests import FileDigest
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.data.training import UpdateResult
from slimrl.observability.run_folder import CHECKPOINT_NAME

STATE_FILE = "state.json"

FULL_MB = 100.0
"""A disk with less free space counts as full; torch's own error only names a position in a file."""

_STEP = "step_{:06d}"
_PARTIAL = ".partial_"

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunState:
    """The state of a run between two steps."""

    step: int = 0
    """Number of completed steps."""
    weight_version: int = 0
    """Version of the weights that the engines serve."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in the training data."""
    prompt_results: dict[str, list[float]] = field(default_factory=dict)
    """Decayed tries and successes by prompt, for `algorithm.dynamic_sampling.refill: value`; else empty."""
    past_versions: dict[str, list[float]] = field(default_factory=dict)
    """Older versions to draw opponents from, by their steps in ascending order, and of each the decayed number of games
    against it and of those that the policy won, a draw counting half."""
    skipped_steps: int = 0
    """Optimizer updates skipped so far because their loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    critic_skipped_in_a_row: int = 0
    suspects: list[str] = field(default_factory=list)
    """Prompts of the trajectories that were at fault in the updates skipped in a row; of supervised training the places
    of the conversations"""
    entropy_weight: float | None = None
    """Weight of the entropy bonus, where `algorithm.entropy_target` adapts it; None before the first step."""
    crossed: dict[str, list[float]] = field(default_factory=dict)
    """Limits of the section `stop` -> the values beyond them in the last steps in a row (stop_rule.py)."""
    reward_series: dict[str, list[float]] = field(default_factory=dict)
    """Means of the reward's parts in the last steps, for reward/hacking_alarm (rewards/alarm.py)."""
    unwritten: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step while they wait for its evaluation; empty once its line is written."""

    def entropy_coef(self, algorithm: AlgorithmConfig) -> float:
        """Weight of the entropy bonus in the next update."""
        return algorithm.entropy_coef if self.entropy_weight is None else self.entropy_weight

    def adapt_entropy_coef(self, algorithm: AlgorithmConfig, entropy: float) -> None:
        """Move the weight toward the target's entropy per token, if there is a target (arXiv:2505.22312, section 4)."""
        if algorithm.entropy_target is not None:
            change = algorithm.entropy_step if entropy < algorithm.entropy_target else -algorithm.entropy_step
            self.entropy_weight = max(0.0, self.entropy_coef(algorithm) + change)


def count_skipped(state: RunState, result: UpdateResult, limit: int, *, critic: bool = False) -> None:
    """Count skipped updates, those in a row of the policy and of its critic apart.

    Raises:
        NotFinite: `limit` updates in a row were skipped.
    """
    counter = "critic_skipped_in_a_row" if critic else "skipped_in_a_row"
    if not result.skipped:
        setattr(state, counter, 0)
        if not state.skipped_in_a_row and not state.critic_skipped_in_a_row:
            state.suspects = []
        return
    in_a_row = getattr(state, counter) + 1
    setattr(state, counter, in_a_row)
    state.skipped_steps += 1
    if in_a_row >= limit:
        whose, setting = ("of the critic ", "critic.trainer") if critic else ("", "trainer")
        raise NotFinite(
            f"{in_a_row} optimizer updates {whose}in a row had a loss or a gradient that is not finite; "
            f"{setting}.max_skipped_updates stops the run here"
        )


class CheckpointFolder:
    """The `checkpoints/` folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def naming_failures(self, step: int) -> Iterator[None]:
        """What fails in the block is the checkpoint of this step, of which no part is left.

        Raises:
            StageError: it could not be written, for example to a full disk; names the checkpoint before it.
            TrainerLost: a rank is lost. Others may still be writing: `clean` comes when they have ended.
        """
        try:
            yield
        except TrainerLost:
            raise
        except (OSError, RunError) as error:
            free_mb = shutil.disk_usage(self.path).free / 1e6
            self.clean()
            older = self.complete()
            full = f"no space left on the disk of {self.path} ({free_mb:.1f} MB): " if free_mb < FULL_MB else ""
            rest = f"--resume continues from {older[-1]}" if older else "There is none before it"
            message = f"the checkpoint of step {step} could not be written: {full}{error}. {rest}."
            raise StageError(message, getattr(error, "details", "")) from error

    def begin(self, step: int) -> Path:
        """A fresh hidden folder to write the checkpoint of `step` into; unfinished ones are removed."""
        self.clean()
        partial = self.path / (_PARTIAL + _STEP.format(step))
        partial.mkdir(parents=True)
        return partial

    def finish(self, partial: Path, state: RunState, files: Mapping[str, FileDigest]) -> Path:
        """Add the state, size and checksum of each file, and a checksum of all that; give the folder its final name."""
        content = {**asdict(state), "files": {name: asdict(digest) for name, digest in sorted(files.items())}}
        content = json.loads(json.dumps(content))
        with (partial / STATE_FILE).open("w") as file:
            file.write(json.dumps({**content, "xxh3_128": _digest(content)}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        final = self.named(state.step)
        before = self.path / f"{_PARTIAL}before_{final.name}"
        if final.exists():
            final.rename(before)
        partial.rename(final)
        if before.exists():
            self.remove(before)
        return final

    def prune(self, keep: int, every_steps: int = 0) -> None:
        """Remove all but the newest `keep` checkpoints, and those of steps that are multiples of `every_steps`."""
        for old in self.complete()[:-keep]:
            if not every_steps or _step_of(old) % every_steps:
                self.remove(old)

    def clean(self) -> None:
        """Remove incomplete checkpoints. No process may be writing one."""
        for partial in self.path.glob(f"{_PARTIAL}*"):
            self.remove(partial)

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of this step is complete."""
        return self.named(step).is_dir()

    def named(self, step: int) -> Path:
        """The folder of the complete checkpoint of this step."""
        return self.path / _STEP.format(step)

    def complete(self) -> list[Path]:
        """Complete checkpoints, the oldest first."""
        return sorted((path for path in self.path.glob("*") if CHECKPOINT_NAME.fullmatch(path.name)), key=_step_of)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        return [_step_of(path) for path in self.complete()]

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint. A complete one is renamed first: an interrupted removal would leave part of it under the
        final name."""
        try:
            if not folder.name.startswith(_PARTIAL):
                folder = folder.rename(self.path / f"{_PARTIAL}{folder.name}")
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("%s could not be removed; the next checkpoint tries again: %s", folder, error)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def read_state(checkpoint: Path) -> tuple[RunState, dict[str, FileDigest] | None]:
    """The state in a checkpoint, and size and checksum of its files; None if it was written without checksums.

    Raises:
        ValueError: its `state.json` is missing or damaged.
    """
    try:
        content = json.loads((checkpoint / STATE_FILE).read_bytes())
        digest = content.pop("xxh3_128", None)
        files = content.get("files")
        if (files is None) != (digest is None) or digest not in (None, _digest(content)):
            raise ValueError("its checksum differs")
        content.pop("files", None)
        if "step" not in content:
            raise ValueError("it has no step")
        state = RunState(**content)
        digests = None if files is None else {name: FileDigest(**value) for name, value in files.items()}
    except OSError as error:
        raise ValueError(f"{STATE_FILE}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{STATE_FILE}: damaged: {error}") from error
    return state, digests


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
