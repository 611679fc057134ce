"""left_out.json of a run folder: what a run leaves out of its data since it went back to an earlier checkpoint.

It is beside the checkpoints, for the one that the run went back to has nothing of it: a run that is killed soon after
and resumed leaves out the same. Of checkpoints from before it also says whether they are of the row of skipped updates
for which the run went back: what was at fault in that row is then left out.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from slimrl.base.atomic import write_whole
from slimrl.runtime.checks.checkpoint_check import check_checkpoint
from slimrl.runtime.state import CheckpointFolder, RunState, read_state

log = logging.getLogger(__name__)


class LeftOut:
    """A run goes back once at the most, so the file is written once."""

    def __init__(self, path: Path, check: Callable[[Collection[str]], object]) -> None:
        """
        Args:
            check: raises ValueError if too little of the data would be left without such items.

        Raises:
            ValueError: the file is damaged, or leaves too little.
        """
        self._path, self._check = path, check
        self.has_gone_back = path.is_file()
        self.items: frozenset[str] = frozenset()
        """Ids of prompts, or in supervised training places of conversations"""
        if not self.has_gone_back:
            return
        try:
            self.items = frozenset(json.loads(path.read_text())["items"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}. Remove it to leave nothing out.") from error
        try:
            check(self.items)
        except ValueError as error:
            raise ValueError(f"{error}, by {path}. Remove it to leave nothing out.") from error

    def go_back(self, items: Collection[str]) -> None:
        """Leave out these from now on. Raises ValueError if too little would be left; nothing is changed then."""
        self._check(items)
        self.items, self.has_gone_back = frozenset(items), True
        write_whole(self._path, json.dumps({"items": sorted(self.items)}, indent=1) + "\n")

    def has_ended_row(self, state: RunState) -> bool:
        """Whether a state is of a row of skipped updates of which all that was at fault is left out."""
        in_a_row = max(state.skipped_in_a_row, state.critic_skipped_in_a_row)
        return self.has_gone_back and in_a_row > 0 and self.items.issuperset(state.suspects)

    def end_row(self, state: RunState) -> None:
        """Count skipped updates in a row anew if `has_ended_row`."""
        if self.has_ended_row(state):
            state.skipped_in_a_row = state.critic_skipped_in_a_row = 0
            state.suspects = []

    def remove_ended_row(self, checkpoints: CheckpointFolder, copies: CheckpointFolder | None = None) -> None:
        """Remove checkpoints and copies in memory of a row that has ended, where a checkpoint from before it is there.

        Their weights are those with which the row began, which may be at fault too.
        """
        if not self.has_gone_back:
            return
        found = _states(checkpoints, lambda path: check_checkpoint(path, contents=False).state)
        if all(map(self.has_ended_row, found.values())):
            return
        self._remove(checkpoints, found)
        if copies is not None:
            # Their files may be on several nodes.
            self._remove(copies, _states(copies, lambda path: read_state(path)[0]))

    def _remove(self, folder: CheckpointFolder, found: Mapping[Path, RunState]) -> None:
        for path, state in found.items():
            if self.has_ended_row(state):
                log.info("%s is removed: the run has gone back behind it", path)
                folder.remove(path)


def _states(folder: CheckpointFolder, read: Callable[[Path], RunState]) -> dict[Path, RunState]:
    """Those that can be read; what is done about others is decided where one is loaded."""
    states = {}
    for path in folder.complete():
        try:
            states[path] = read(path)
        except ValueError as error:
            log.warning("%s", error)
    return states
