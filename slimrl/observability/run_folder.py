"""The folder of a run: what lies where, and that an existing one is never overwritten by accident."""

import errno
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

CHECKPOINT_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class RunFolder:
    """Paths inside `runs/<name>/`."""

    path: Path
    checkpoint_log: Path | None = None
    """A file outside of it for whoever waits for checkpoints; see `note_checkpoint`."""

    @property
    def config(self) -> Path:
        """The resolved recipe; its presence marks a folder as a run folder."""
        return self.path / "config.yaml"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.path / "logs"

    @property
    def trajectories(self) -> Path:
        """Readable samples, one file per step."""
        return self.path / "trajectories"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face checkpoint."""
        return self.path / "export" / "hf"

    @property
    def requeue(self) -> Path:
        """Present while a run that was preempted waits to be continued; holds the number of its last step."""
        return self.path / "requeue"

    @property
    def jobs(self) -> Path:
        """Ids of the queued jobs whose attempts have opened this run, one a line."""
        return self.path / "jobs"

    def is_of_job(self, job: str) -> bool:
        return self.jobs.is_file() and job in self.jobs.read_text().split()

    def note_job(self, job: str) -> None:
        if not self.is_of_job(job):
            with self.jobs.open("a") as file:
                file.write(f"{job}\n")

    @property
    def ended_early(self) -> Path:
        """Present where a run ended before anything came of it; another one may take its place."""
        return self.path / "ended_early"

    @property
    def has_checkpoint(self) -> bool:
        """Whether a resumed run would continue from somewhere; a folder of that name is complete."""
        return any(CHECKPOINT_NAME.fullmatch(path.name) for path in self.checkpoints.glob("*"))

    def note_checkpoint(self, step: int | None) -> None:
        """Add a line to `checkpoint_log`: the step that a run goes on from, None for a new one; then each one saved."""
        if self.checkpoint_log is not None:
            with self.checkpoint_log.open("a") as file:
                file.write(f"{'none' if step is None else step}\n")

    def note_early_end(self) -> None:
        """Mark a run that ends without metrics and without a checkpoint; other folders stay as they are."""
        begun = self.metrics.is_file() and self.metrics.stat().st_size > 0
        if self.config.is_file() and not begun and not self.has_checkpoint:
            self.ended_early.touch()

    def fresh_export(self) -> Path:
        """`export` for writing: the one of an earlier end of the same run is removed."""
        if self.export.exists():
            shutil.rmtree(self.export)
        return self.export

    def sample_file(self, step: int) -> Path:
        return self.trajectories / f"step_{step:06d}.jsonl"

    def log_file(self, process: str) -> Path:
        return self.logs / f"{process}.log"


def set_aside(run: RunFolder) -> Path | None:
    """Give an existing run's folder, with everything in it, the first free name `<name>.attempt_NNN` beside it.

    Returns:
        The new path; None where there was nothing.

    Raises:
        ValueError: the folder is not a run's.
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
    """Create `folder/name` with its subfolders and config.yaml, or take up the existing one.

    A start that is killed in here leaves an earlier run whole, or a new one, or none, never a part of one: the new
    folder appears under its name when it is complete, and the earlier one is removed last, under a hidden name.

    Args:
        folder: where runs live; made if absent.
        name: of the run.
        config_yaml: the resolved recipe, written to config.yaml; a resumed run keeps the one it started with
            and gets this one beside it as config.resumed.yaml.
        resume: continue an existing run.
        overwrite: remove an existing run first, which may take minutes.
        job: id of a queued job that opens it, see `RunFolder.jobs`.
        claim: called with a new folder before it has its name, under which others can find it.

    Raises:
        ValueError: see `check_run_folder`.
    """
    run = RunFolder(folder / name)
    check_run_folder(run, resume=resume, overwrite=overwrite)
    if resume:
        (run.path / "config.resumed.yaml").write_text(config_yaml)
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
        # Takes the place of an empty folder, and of nothing else.
        fresh.path.rename(run.path)
    except OSError as error:
        shutil.rmtree(fresh.path)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another start has made it since.
        raise ValueError(_refusal(run)) from error
    for replaced in folder.iterdir():
        if re.fullmatch(rf"\.{re.escape(name)}\.replaced_\d+", replaced.name):
            # Another start may be removing it too, which then goes on.
            with suppress(FileNotFoundError):
                shutil.rmtree(replaced)
    return run


def _fill(run: RunFolder, job: str | None) -> None:
    if job is not None:
        run.note_job(job)
    for path in (run.logs, run.checkpoints):
        path.mkdir(exist_ok=True)


def _first_free(path: Path) -> Path:
    """`path` with the first number behind its name that gives none that exists."""
    paths = (path.with_name(f"{path.name}_{number:03d}") for number in count())
    return next(path for path in paths if not path.exists())


def check_run_folder(run: RunFolder, *, resume: bool, overwrite: bool) -> None:
    """Refuse what `open_run_folder` does; nothing is changed.

    Raises:
        ValueError: the run exists and neither flag is given; `resume` and there is none; both flags; the folder exists
            and is not a run's, or is to be removed and is a link.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if resume:
        if not run.config.is_file():
            raise ValueError(f"{run.path}: there is no run to resume. Start it without --resume.")
    elif overwrite:
        if run.path.is_symlink():
            raise ValueError(f"{run.path} is a link, and --overwrite removes folders alone. Remove it yourself.")
        if run.path.exists() and any(run.path.iterdir()):
            _check_is_run(run)
    elif run.path.exists():
        _check_is_run(run)
        raise ValueError(_refusal(run))


def _refusal(run: RunFolder) -> str:
    if run.has_checkpoint:
        return f"{run.path} exists. Use --resume to continue it, --overwrite to start anew, or another run.name."
    return (
        f"{run.path} exists, without a checkpoint. Use --resume-or-start to put it aside and start anew, "
        "--overwrite to remove it, or another run.name."
    )


def _check_is_run(run: RunFolder) -> None:
    if not run.config.is_file():
        raise ValueError(f"{run.path} holds no config.yaml, so it is no run folder. Remove it yourself.")
