"""Buffers on the leader of each node, which the node's other ranks map."""

from torch import Tensor

from slimrl import device
from slimrl.resync.ipc.shared_buffer import SharedBuffer, open_shared, shared_buffer
from slimrl.resync.ranks import RankError, Ranks


class NodeMemory:
    """Buffers on the leader of this rank's node. All ranks construct it together.

    Args:
        leader: of this rank's node.
        count: buffers on this rank, if it is the leader; the number may differ between leaders.
        run_id: part of a file's name.
        mapped: whether the other ranks map them.

    Raises:
        OSError: on all ranks, when one of them got no memory; all is released.
        RankError: another rank died or is late; this one's is released.
    """

    def __init__(self, ranks: Ranks, leader: int, count: int, nbytes: int, run_id: str, *, mapped: bool) -> None:
        self.buffers: list[SharedBuffer] = []
        """The leader's buffers; empty on other ranks."""
        self.tensors: list[Tensor] = []
        """The buffers as tensors, uint8 [nbytes]; on other ranks those of the leader, if they are mapped."""
        try:
            self._allocate(ranks, count if ranks.rank == leader else 0, nbytes, run_id)
            self.tensors = [buffer.tensor for buffer in self.buffers]
            if mapped:
                segments = ranks.gather_objects([buffer.segment() for buffer in self.buffers])[leader]
                self.tensors = self.tensors or [open_shared(segment, writable=True) for segment in segments]
        except (OSError, RankError):
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        return sum(buffer.tensor.numel() for buffer in self.buffers)

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers, self.tensors = [], []

    def _allocate(self, ranks: Ranks, count: int, nbytes: int, run_id: str) -> None:
        problem = None
        try:
            for _ in range(count):
                self.buffers.append(shared_buffer(nbytes, run_id, device.compute_device()))
        except OSError as error:
            problem = f"rank {ranks.rank}: {count} buckets of {nbytes} bytes: {error}"
        problems = [each for each in ranks.gather_objects(problem) if each is not None]
        if problems:
            raise OSError("; ".join(problems))
