"""The engine's end of the `ipc` transport: a rank copies what it keeps out of slots that trainer ranks have filled.

The trainer sends each rank the plan of its rounds: which regions of which tensors lie where in whose slots. For each
round that is whole it tells all ranks to load it. The slots stay mapped until another plan comes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimrl.data.model_weights import EngineModel
from slimrl.data.peer_messages import Entry, Placed

if TYPE_CHECKING:
    from slimrl.engines.plugin.kept_tensors import KeptRegion


def plain_loads(rounds: Mapping[EngineModel, Sequence[Sequence[Placed]]]) -> dict[str, list[Any]]:
    """Rounds as plain values: SGLang unpickles no class of ours."""
    return {
        model.value: [
            [(one.message.source, one.offset, [tuple(each) for each in one.message.entries]) for one in messages]
            for messages in of_model
        ]
        for model, of_model in rounds.items()
    }


class SharedRounds:
    """One rank's plan, and the slots that it maps: those in which it finds something.

    Args:
        rounds: from `plain_loads`.
        segments: of the slots of each trainer rank, by its number.

    Raises:
        OSError, ValueError: a slot is gone, or a segment names none.
    """

    def __init__(self, rounds: dict[str, list[Any]], segments: dict[int, list[str]]) -> None:
        from slimrl.resync.ipc.shared_buffer import open_shared

        self._rounds = rounds
        sources = {source for of_model in rounds.values() for messages in of_model for source, *_ in messages}
        self._slots = {source: [open_shared(segment) for segment in segments[source]] for source in sorted(sources)}

    def load(self, model: str, number: int, slot: int, regions: "dict[str, list[KeptRegion]]") -> None:
        """Copy a round into the parameters of one model.

        Args:
            number: of the round; one beyond the rank's last has nothing for it.
            slot: number of the slot in which it lies.
            regions: what the rank keeps in the model.

        Raises:
            ValueError: this rank does not keep a region.
        """
        import torch

        from slimrl.engines.plugin.peer_receiver import place

        rounds = self._rounds[model]
        with torch.no_grad():
            for source, offset, entries in rounds[number] if number < len(rounds) else ():
                place([Entry._make(entry) for entry in entries], self._slots[source][slot][offset:], regions)
