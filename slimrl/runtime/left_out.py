"""left_out.json of a run folder: what a run leaves out of its data since it went back to an earlier checkpoint.

It is beside the checkpoints, for the one that the run went back to has nothing of it: a run that is killed soon after
and resumed leaves out the same.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from slimrl.base.atomic import write_whole


class LeftOut:
    """A run goes back once at the most, so the file is written once."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file is damaged.
        """
        self._path = path
        self.has_gone_back = path.is_file()
        self.items: frozenset[str] = frozenset()
        """Ids of prompts, or in supervised training places of conversations"""
        if self.has_gone_back:
            try:
                self.items = frozenset(json.loads(path.read_text())["items"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} is damaged: {error}. Remove it to leave nothing out.") from error

    def go_back(self, items: Iterable[str]) -> None:
        """Leave out these from now on."""
        self.items, self.has_gone_back = frozenset(items), True
        write_whole(self._path, json.dumps({"items": sorted(self.items)}, indent=1) + "\n")
