"""The task's filters of groups, with their failures named."""

from collections.abc import Sequence

from slimrl.base.errors import RunError
from slimrl.data.trajectory import Trajectory
from slimrl.rollout.task.task import GroupFilter


class GroupFilters:
    """All filters of groups as one: called with a group, it tells whether all of them keep it."""

    def __init__(self, names: Sequence[str], filters: Sequence[GroupFilter]) -> None:
        """`names` are the filters' import paths."""
        self._names, self._filters = names, filters

    def __call__(self, group: list[Trajectory]) -> bool:
        """Whether all filters keep a group. Raises RunError if one of them fails; names it and the group."""
        for name, keeps in zip(self._names, self._filters, strict=True):
            try:
                if not keeps(group):
                    return False
            except Exception as error:
                # A task's own code may raise anything. The message names the filter; the driver's log has the rest.
                raise RunError(f"{name} failed on {group[0].group_id}: {type(error).__name__}: {error}") from error
        return True
