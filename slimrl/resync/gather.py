"""Writes one rank's pieces of a bucket into the memory of its node, as plan.py says.

A piece is written straight to its final place, in one copy from the live weight that also converts the dtype.
"""

from torch import Tensor

from slimrl import device
from slimrl.data.weights import WeightSource
from slimrl.resync.plan import ResyncPlan


class Gatherer:
    def __init__(self, plan: ResyncPlan, source: WeightSource, rank: int) -> None:
        self._source = source
        self._writes = [plan.writes(bucket, rank) for bucket in plan.buckets]

    def write(self, number: int, flat: Tensor) -> None:
        """Write this rank's pieces of bucket `number` into the node's memory.

        It has all that the node's ranks hold, and the node needs or passes on, when all of them have returned.
        """
        for part, region, piece in self._writes[number]:
            groups = self._source.groups(part.spec.name)
            target = part.region_view(flat, region)
            first_row = piece.first_row + (region[0].start - piece.region[0].start if region else 0)
            # Without the padding that may follow.
            columns = [slice(0, edge.stop - edge.start) for edge in region[1:]]
            copy_rows(target if target.ndim else target[None], groups[:, :, *columns], first_row)
        device.finish_queued_work()


def copy_rows(target: Tensor, groups: Tensor, start: int) -> None:
    """Fill `target` with the rows of groups [G, R, ...] from row `start` on, counted through all groups."""
    size, row, stop = groups.shape[1], start, start + target.shape[0]
    while row < stop:
        group, within = divmod(row, size)
        whole = (stop - row) // size if within == 0 else 0
        count = whole * size or min(size - within, stop - row)
        place = target[row - start : row - start + count]
        if whole:
            place.unflatten(0, (whole, size)).copy_(groups[group : group + whole])
        else:
            place.copy_(groups[group, within : within + count])
        row += count
