"""What ranks raise together of what some of them could not write."""

import pytest
from thread_dist import Group, ThreadDist

from slimrl.base.errors import NotWritten
from slimrl.trainer.checkpointing import failures
from slimrl.trainer.checkpointing.failures import CheckpointException, failing_together

FULL = OSError(28, "No space left on device")


class OneGroup(ThreadDist):
    """Ranks that name no group."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._all = Group(tuple(range(size)))

    def all_gather_object(self, values, value, group=None):
        super().all_gather_object(values, value, self._all)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([None, None, None], None),
        ([None, FULL, None], "rank 1: [Errno 28] No space left on device"),
        ([FULL, OSError("late"), FULL], "rank 0 and 1 more: [Errno 28] No space left on device; rank 1: late"),
        ([OSError(f"file {rank}") for rank in range(5)], "rank 0: file 0; rank 1: file 1; rank 2: file 2; 2 more"),
        # Megatron-core gives the causes to the first rank alone.
        (
            [CheckpointException("write", {2: (FULL, None)}), *[CheckpointException("write", {}) for _ in range(2)]],
            "rank 2: [Errno 28] No space left on device",
        ),
    ],
)
def test_all_ranks_raise_the_same_and_none_if_none_failed(monkeypatch, errors, said):
    ranks = OneGroup(len(errors))
    monkeypatch.setattr(failures, "dist", ranks)

    def text(rank):
        try:
            with failing_together():
                if errors[rank] is not None:
                    raise errors[rank]
        except NotWritten as error:
            return str(error)
        return None

    assert ranks.run(text) == [said] * len(errors)


def test_what_is_no_matter_of_files_is_the_rank_s_own(monkeypatch):
    monkeypatch.setattr(failures, "dist", None)
    with pytest.raises(ValueError, match=r"^no such model$"), failing_together():
        raise ValueError("no such model")
