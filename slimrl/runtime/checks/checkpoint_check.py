"""Checks that a run's checkpoint is intact: its files against the sizes and checksums in its `state.json`.

A damaged checkpoint is refused, and the message names the newest intact one. A run never falls back to that one by
itself: the user first moves the damaged one away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.checkpoints.digests import Seen, differences, not_shown
from slimrl.runtime.state import CheckpointFolder, RunState, read_state

SHOWN_FILES = 5


@dataclass(frozen=True, kw_only=True)
class WholeCheckpoint:
    path: Path
    state: RunState
    has_checksums: bool
    """Whether the checkpoint has checksums of its files; without them only its state was checked."""


def check_checkpoint(checkpoint: Path, *, contents: bool, seen: Seen = not_shown) -> WholeCheckpoint:
    """Compare a checkpoint with the sizes and checksums of its files when they were written.

    Args:
        contents: read every file for its checksum; otherwise compare only sizes.
        seen: called after each file that is read.

    Raises:
        ValueError: it is damaged; names the files and says how.
    """
    problems: list[str] = []
    try:
        state, files = read_state(checkpoint)
        problems += differences(checkpoint, files or {}, seen, contents=contents)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError(_damage(checkpoint, problems))
    return WholeCheckpoint(path=checkpoint, state=state, has_checksums=files is not None)


def _damage(checkpoint: Path, problems: Sequence[str]) -> str:
    """Says of a checkpoint that it is damaged, and how."""
    shown = [f"\n  {problem}" for problem in problems[:SHOWN_FILES]]
    more = f"\n  and {len(problems) - SHOWN_FILES} more files" if len(problems) > SHOWN_FILES else ""
    return f"{checkpoint} is damaged:{''.join(shown)}{more}"


def refusal(checkpoint: Path, problems: Sequence[str]) -> str:
    """Says how the newest checkpoint of a run is damaged, and from which one it can go on, without reading that one."""
    complete = CheckpointFolder(checkpoint.parent).complete()
    return "\n".join([_damage(checkpoint, problems), *_how_to_continue(complete, contents=False)])


def newest_checkpoint(folder: CheckpointFolder, *, contents: bool, seen: Seen = not_shown) -> WholeCheckpoint | None:
    """The newest checkpoint of a run; None if there is none yet.

    Raises:
        ValueError: it is damaged; also says how to continue from the newest intact one, if there is one.
    """
    complete = folder.complete()
    if not complete:
        return None
    try:
        return check_checkpoint(complete[-1], contents=contents, seen=seen)
    except ValueError as error:
        raise ValueError("\n".join([str(error), *_how_to_continue(complete, contents=contents)])) from error


def check_exported(checkpoint: Path, seen: Seen = not_shown) -> None:
    """Refuse to export a damaged checkpoint.

    Raises:
        ValueError: it is damaged; also names the newest intact one of its run.
    """
    try:
        check_checkpoint(checkpoint, contents=True, seen=seen)
    except ValueError as error:
        others = [path for path in CheckpointFolder(checkpoint.parent).complete() if path.name != checkpoint.name]
        _, whole = _newest_whole(others, contents=True)
        hint = (
            f"Give another --checkpoint: {whole} is intact." if whole else "No other checkpoint of the run is intact."
        )
        raise ValueError(f"{error}\n{hint}") from error


def _newest_whole(checkpoints: Sequence[Path], *, contents: bool) -> tuple[list[Path], Path | None]:
    """The newest intact checkpoint, if there is one, and the damaged ones after it; `checkpoints` is oldest first."""
    damaged: list[Path] = []
    for checkpoint in reversed(checkpoints):
        try:
            check_checkpoint(checkpoint, contents=contents)
        except ValueError:
            damaged.append(checkpoint)
        else:
            return damaged, checkpoint
    return damaged, None


def _how_to_continue(complete: Sequence[Path], *, contents: bool) -> list[str]:
    newest, before = complete[-1], complete[:-1]
    damaged, whole = _newest_whole(before, contents=contents)
    lines = [f"{path} is damaged too." for path in damaged]
    if whole is None:
        return [*lines, "No checkpoint before it is intact. Restore it from a copy, or start anew with --overwrite."]
    intact = "is intact" if contents else "has all of its files, which are compared when it is loaded"
    return [
        *lines,
        f"{whole} {intact}. To continue from there, move the damaged away and give the same command again:",
        *(f"  mv {path} {path.with_name(f'damaged_{path.name}')}" for path in (newest, *damaged)),
    ]
