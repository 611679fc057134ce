"""The folder of a run: its files, and how it is created without overwriting another run."""

import errno
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypedDict

from slimrl.base.atomic import write_whole
from slimrl.base.spans import PROFILE_FOLDER

CHECKPOINT_NAME = re.compile(r"step_(\d{6,})")


class Opening(TypedDict):
    """Options of a command on an earlier run of the same name."""

    resume: bool | None
    """Whether to continue that run; None to do so if it has a checkpoint, and else to move it away"""
    overwrite: bool
    job: str | None
    """Id of the queued job of which this is an attempt. A run that an earlier attempt of the job opened is treated as
    with `resume=None`; `resume` and `overwrite` apply to other runs."""
    checkpoint_log: Path | None
    """File outside the folder for whoever waits for checkpoints; see `RunFolder.note_checkpoint`"""


@dataclass
class RunFolder:
    """Paths inside `runs/<name>/`."""

    path: Path
    checkpoint_log: Path | None = None
    """File outside the folder for whoever waits for checkpoints; see `note_checkpoint`."""

    def __post_init__(self) -> None:
        self.config = self.path / "config.yaml"
        """The resolved recipe; its presence marks a folder as a run folder."""
        self.resumed_config = self.path / "config.resumed.yaml"
        """The resolved recipe of the newest attempt to continue the run."""
        self.provenance = self.path / "provenance.json"
        self.metrics = self.path / "metrics.jsonl"
        self.now = self.path / "now.json"
        """What the run does at present; a process that is killed leaves it behind."""
        self.groups = self.path / "groups.jsonl"
        """What became of each group, and when (docs/async.md)."""
        self.left_out = self.path / "left_out.json"
        """What the data are trained without since the run went back, with `stop.rewind_not_finite`."""
        self.curve = self.path / "curve.png"
        self.logs = self.path / "logs"
        """Log files, one per process."""
        self.span_report = self.logs / "opentelemetry.jsonl"
        """What became of each step's spans, with `tracking.opentelemetry`."""
        self.trajectories = self.path / "trajectories"
        """Readable samples, one file per step and one per evaluation set, and those recorded with their tokens."""
        self.expert_load = self.path / "expert_load"
        """Tokens of each expert, one file per step."""
        self.profile = self.path / PROFILE_FOLDER
        """Spans of the steps that `--profile` names, and their trace."""
        self.wandb = self.path / "wandb"
        self.tensorboard = self.path / "tensorboard"
        self.mlflow = self.path / "mlflow"
        self.checkpoints = self.path / "checkpoints"
        self.past_versions = self.path / "past_versions"
        """Older versions of the policy that play against it, a Hugging Face checkpoint each."""
        self.export = self.path / "export" / "hf"
        """The trained model as a Hugging Face checkpoint."""
        self.exports = self.path / "exports"
        """The models of steps, with `checkpoint.export_every_steps`."""
        self.requeue = self.path / "requeue"
        """Marker file of a preempted run that waits to be continued; holds the number of its last step."""
        self.jobs = self.path / "jobs"
        """Ids of the queued jobs whose attempts have opened this run, one per line."""
        self.ended_early = self.path / "ended_early"
        """Marker file of a run that ended without metrics or a checkpoint; another run may take its place."""

    def newest_config(self) -> str:
        """The resolved recipe of the newest attempt."""
        return (self.resumed_config if self.resumed_config.is_file() else self.config).read_text()

    def is_of_job(self, job: str) -> bool:
        return self.jobs.is_file() and job in self.jobs.read_text().split()

    def note_job(self, job: str) -> None:
        if not self.is_of_job(job):
            with self.jobs.open("a") as file:
                file.write(f"{job}\n")

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from; a folder of that name is complete."""
        return any(CHECKPOINT_NAME.fullmatch(path.name) for path in self.checkpoints.glob("*"))

    def note_checkpoint(self, step: int | None) -> None:
        """Add a line to `checkpoint_log`: the step at which the run continues (None if new), then each one saved."""
        if self.checkpoint_log is not None:
            with self.checkpoint_log.open("a") as file:
                file.write(f"{'none' if step is None else step}\n")

    def note_early_end(self) -> None:
        """Mark a run that ends without metrics and without a checkpoint."""
        begun = self.metrics.is_file() and self.metrics.stat().st_size > 0
        if self.config.is_file() and not begun and not self.has_checkpoint:
            self.ended_early.touch()

    def fresh_export(self) -> Path:
        """`export` for writing: an earlier export of the run is removed."""
        if self.export.exists():
            shutil.rmtree(self.export)
        return self.export

    def fresh_step_export(self, step: int) -> Path:
        """Folder for the model of a step: one of the same step, which the run has gone back behind, is removed."""
        folder = self.exports / f"step_{step:06d}"
        if folder.exists():
            shutil.rmtree(folder)
        return folder

    @property
    def failed_file(self) -> Path:
        """Conversations of a rollout or an evaluation that ended the run since too many of them failed."""
        return self.trajectories / "failed.jsonl"

    def not_finite_file(self, step: int, update: int, *, critic: bool = False) -> Path:
        """Groups of an update of a step, counted from 1, that had a loss or a gradient which is not finite."""
        return self.trajectories / f"{'critic_' if critic else ''}not_finite_{step:06d}_{update}.jsonl"

    def sample_file(self, step: int) -> Path:
        return self.trajectories / f"step_{step:06d}.jsonl"

    def eval_sample_file(self, step: int, set_name: str) -> Path:
        return self.trajectories / f"eval_{step:06d}_{set_name}.jsonl"

    def recorded_file(self, step: int) -> Path:
        """Trajectories of a step with their tokens."""
        return self.trajectories / f"step_{step:06d}.parquet"

    def eval_recorded_file(self, step: int, set_name: str) -> Path:
        return self.trajectories / f"eval_{step:06d}_{set_name}.parquet"

    def expert_load_file(self, step: int) -> Path:
        return self.expert_load / f"step_{step:06d}.parquet"

    def log_file(self, process: str) -> Path:
        return self.logs / f"{process}.log"


def set_aside(run: RunFolder) -> Path | None:
    """Rename an existing run's folder to the first free name `<name>.attempt_NNN`.

    Returns:
        The new path; None if there was no run.

    Raises:
        ValueError: it is not a run folder.
    """
    if not run.path.exists():
        return None
    if not any(run.path.iterdir()):
        run.path.rmdir()
        return None
    _check_is_run(run)
    return run.path.rename(_first_free(run.path.with_name(f"{run.path.name}.attempt")))


def open_run_folder(
    folder: Path,
    name: str,
    config_yaml: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    job: str | None = None,
    claim: Callable[[Path], object] = lambda path: None,
) -> RunFolder:
    """Create `folder/name` with its subfolders and config.yaml, or open the existing one.

    A process killed in here leaves a whole run or none, never a part of one: the new folder gets its name when it is
    complete, and the earlier one is removed last, under a hidden name.

    Args:
        folder: parent of run folders; created if absent.
        config_yaml: the resolved recipe, written to config.yaml; a resumed run keeps its config.yaml and gets this one
            as config.resumed.yaml.
        overwrite: remove an existing run first, which may take minutes.
        job: id of the queued job that opens it, see `RunFolder.jobs`.
        claim: called with a new folder before it gets its final name, by which others can find it.

    Raises:
        ValueError: see `check_run_folder`.
    """
    run = RunFolder(folder / name)
    check_run_folder(run, resume=resume, overwrite=overwrite)
    if resume:
        write_whole(run.resumed_config, config_yaml)
        _fill(run, job)
        return run
    fresh = RunFolder(folder / f".{name}.new_{secrets.token_hex(4)}")
    fresh.path.mkdir(parents=True)
    fresh.config.write_text(config_yaml)
    _fill(fresh, job)
    claim(fresh.path)
    if overwrite and run.path.exists():
        run.path.rename(_first_free(folder / f".{name}.replaced"))
    try:
        # Replaces an empty folder only.
        fresh.path.rename(run.path)
    except OSError as error:
        shutil.rmtree(fresh.path)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another process has created it meanwhile.
        raise ValueError(_refusal(run)) from error
    for replaced in folder.iterdir():
        if re.fullmatch(rf"\.{re.escape(name)}\.replaced_\d+", replaced.name):
            # Another process may be removing it too.
            with suppress(FileNotFoundError):
                shutil.rmtree(replaced)
    return run


def _fill(run: RunFolder, job: str | None) -> None:
    if job is not None:
        run.note_job(job)
    for path in (run.logs, run.checkpoints):
        path.mkdir(exist_ok=True)


def _first_free(path: Path) -> Path:
    """`<path>_NNN` with the first number that is not taken."""
    paths = (path.with_name(f"{path.name}_{number:03d}") for number in count())
    return next(path for path in paths if not path.exists())


def check_run_folder(run: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Refuse what `open_run_folder` would refuse, without changing anything.

    Raises:
        ValueError: the run exists and neither flag is given; there is no run to resume; both flags are given; the
            folder is not a run folder; or it is to be removed and is a link.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if resume:
        if not run.config.is_file():
            raise ValueError(f"{run.path}: there is no run to resume. Start it without --resume.")
    elif overwrite:
        if run.path.is_symlink():
            raise ValueError(f"{run.path} is a link, and --overwrite only removes folders. Remove it yourself.")
        if run.path.exists() and any(run.path.iterdir()):
            _check_is_run(run)
    elif run.path.exists():
        _check_is_run(run)
        raise ValueError(_refusal(run))


def check_start(run: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Refuse what `check_run_folder` refuses, but let a run that ended before its first step give way to any other."""
    if resume or not run.ended_early.is_file():
        check_run_folder(run, resume=resume, overwrite=overwrite)


def _refusal(run: RunFolder) -> str:
    if run.has_checkpoint:
        return f"{run.path} exists. Use --resume to continue it, --overwrite to start anew, or another run.name."
    return (
        f"{run.path} exists, without a checkpoint. Use --resume-or-start to rename it and start anew, "
        "--overwrite to remove it, or another run.name."
    )


def _check_is_run(run: RunFolder) -> None:
    if not run.config.is_file():
        raise ValueError(f"{run.path} holds no config.yaml, so it is not a run folder. Remove it yourself.")
