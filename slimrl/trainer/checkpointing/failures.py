"""What a rank cannot write of a checkpoint, all ranks learn of; none waits in a collective for one that has failed."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slimrl.base.errors import NotWritten

MOST_TEXTS = 3
"""Different failures that an error gives; the ranks' logs have all."""

log = logging.getLogger(__name__)


@contextmanager
def failing_together() -> Iterator[None]:
    """The block ends when it has on all ranks, each of which calls it.

    Raises:
        NotWritten: on all ranks, where the block raises an OSError, or megatron-core's CheckpointException, on any.
    """
    failed: dict[int, str] | None = None
    try:
        yield
    except OSError as error:
        log.warning("a checkpoint could not be written", exc_info=True)
        failed = {dist.get_rank(): str(error)}
    except CheckpointException as error:
        # The first rank has the causes, and the others none.
        failed = {rank: str(cause) for rank, (cause, _) in error.failures.items()}
    of_ranks: list[dict[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, failed)
    known = [each for each in of_ranks if each is not None]
    if known:
        raise NotWritten(_text({rank: text for each in known for rank, text in each.items()}))


def _text(failures: Mapping[int, str]) -> str:
    """What failed, by rank, in a line."""
    ranks = defaultdict(list)
    for rank, text in sorted(failures.items()):
        ranks[text].append(rank)
    texts = [
        f"rank {first}{f' and {len(others)} more' if others else ''}: {text}"
        for text, (first, *others) in ranks.items()
    ]
    more = [f"{len(texts) - MOST_TEXTS} more"] if len(texts) > MOST_TEXTS else []
    return "; ".join([*texts[:MOST_TEXTS], *more])
