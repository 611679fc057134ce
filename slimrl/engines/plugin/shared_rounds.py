"""The engine's end of the `ipc` transport: a rank copies what it keeps out of slots that trainer ranks have filled.

The trainer sends each rank the plan of its rounds: which regions of which tensors lie where in whose slots. For each
round that is whole it tells all ranks to load it. The slots stay mapped until another plan comes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slimrl.data.peer_messages import Entry, Placed

if TYPE_CHECKING:
    from torch import Tensor

    from slimrl.engines.plugin.kept_tensors import KeptRegion


def plain_loads(rounds: Sequence[Sequence[Placed]]) -> list[Any]:
    """Rounds as plain values: SGLang unpickles no class of ours."""
    return [
        [(one.message.source, one.offset, [tuple(each) for each in one.message.entries]) for one in messages]
        for messages in rounds
    ]


class SharedRounds:
    """One rank's plan, and the slots that it maps.

    Args:
        rounds: from `plain_loads`.
        segments: of the slots of each trainer rank, by its number; round k lies in slot k modulo their count.
    """

    def __init__(self, rounds: list[Any], segments: dict[int, list[str]]) -> None:
        self._rounds, self._segments = rounds, segments
        self._mapped: dict[str, Tensor] = {}
        self._version = -1
        self._regions: dict[str, dict[str, list[KeptRegion]]] = {}

    def load(self, model: Any, holder: str, version: int, number: int) -> None:
        """Copy a round into the parameters of one model.

        Args:
            holder: which of the engine's models it is.

        Raises:
            OSError, ValueError: a slot is gone, or this rank does not keep a region.
        """
        import torch

        from slimrl.engines.plugin.kept_tensors import kept_regions
        from slimrl.engines.plugin.peer_receiver import place

        if version != self._version:
            # Parameters may lie elsewhere after a release of memory, between two versions.
            self._version, self._regions = version, {}
        if holder not in self._regions:
            self._regions[holder] = kept_regions(model)
        regions = self._regions[holder]
        with torch.no_grad():
            for source, offset, entries in self._rounds[number]:
                slot = self._slot(self._segments[source], number)
                place([Entry._make(entry) for entry in entries], slot[offset:], regions)

    def _slot(self, segments: list[str], number: int) -> "Tensor":
        from slimrl.resync.ipc.shared_buffer import open_shared

        segment = segments[number % len(segments)]
        if segment not in self._mapped:
            self._mapped[segment] = open_shared(segment)
        return self._mapped[segment]
