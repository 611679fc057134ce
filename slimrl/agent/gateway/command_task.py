"""A task whose files an agent's command finds in its folder, and whose verdict is read from what it leaves there."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class CommandTask(Protocol):
    """One trajectory's files. It runs in slimrl's own process, and sees what the command must not."""

    async def fill(self, line: Mapping[str, Any], work: Path) -> Mapping[str, Any]:
        """Write what the command starts with.

        Args:
            line: of the data: `id`, `messages`, `label`, `metadata`.
            work: the command's folder, empty.

        Returns:
            The line that the command gets in its place.
        """
        ...

    async def judge(self, work: Path) -> float:
        """The trajectory's reward, once the command has ended, well or not.

        Args:
            work: the command's folder, where links may lead anywhere.
        """
        ...


def check_task(path: str, make: Any) -> None:
    """Raises ValueError: the class, named by its import path, lacks a method."""
    for name in ("fill", "judge"):
        if not inspect.iscoroutinefunction(getattr(make, name, None)):
            raise ValueError(f"{path}: has no `async def {name}`, which the task of a command has")
