"""The rounds in which an engine receives a version, and their messages: a pure function.

1. A share that is larger than half of a sender's slot is cut between rows.
2. Every sender spreads its shares evenly over the rounds, so all network adapters carry in every round, whichever
   layers their ranks hold.
3. In no round does a rank send or receive more than its slot holds; a share that does not fit goes into a later one.
4. What a sender has for the same ranks in a round is one message.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.boxes import pieces, rows
from slimrl.data.model_weights import TensorSpec
from slimrl.data.peer_messages import Entry, Message, Round
from slimrl.resync.p2p.shares import Share

MIN_ROUNDS = 8
"""Rounds of a version that is large enough, so that staging and sending overlap."""
SMALL_BYTES = 4 * 1024**2
"""What a rank should at least get in a round, where that gives fewer rounds."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Bytes that ranks may send or receive in one round."""

    engine: int
    """A rank of an engine receives at most so many."""
    trainer: int
    """A rank of the trainer sends at most so many to one engine."""


def plan_rounds(shares: Sequence[Share], specs: Sequence[TensorSpec], slots: Slots) -> tuple[Round, ...]:
    """Rounds of one model of one engine.

    Args:
        shares: in the order of the tensors.
        specs: of the sent tensors.

    Raises:
        ValueError: a row of a tensor does not fit into a slot; see `least_slot`.
    """
    slot = min(slots.engine, slots.trainer)
    cut: list[Share] = []
    for share in shares:
        if share.nbytes <= slot // 2:
            cut.append(share)
        else:
            cut += _cut(share, specs, slot)
    sends = Counter[int]()
    received = _Received()
    for share in cut:
        sends[share.source] += share.nbytes
        received.add(share)
    most_sent = max(sends.values(), default=0)
    count = max(
        1,
        min(MIN_ROUNDS, max(most_sent, received.most) // SMALL_BYTES),
        -(-most_sent // slots.trainer),
        -(-received.most // slots.engine),
    )
    filled: list[list[Share]] = []
    used: list[tuple[Counter[int], _Received]] = []
    for fraction, share in _spread(cut, sends):
        number = int(fraction * count)
        while True:
            while len(filled) <= number:
                filled.append([])
                used.append((Counter(), _Received()))
            out, into = used[number]
            if out[share.source] + share.nbytes <= slots.trainer and into.with_another(share) <= slots.engine:
                break
            number += 1
        out[share.source] += share.nbytes
        into.add(share)
        filled[number].append(share)
    sizes = [element_bytes(spec.dtype) for spec in specs]
    return tuple(_messages(each, specs, sizes) for each in filled if each)


class _Received:
    """What the ranks of an engine get in a round. What several of them keep counts as if all of them did, which is at
    most a little too much and much faster than to count for each."""

    def __init__(self) -> None:
        self._alone: Counter[int] = Counter()
        self._most_alone = 0
        self._together = 0

    @property
    def most(self) -> int:
        """Bytes of the rank that gets most."""
        return self._most_alone + self._together

    def with_another(self, share: Share) -> int:
        """The same if the share came too, for the ranks that get it."""
        alone = self._alone[share.target] if len(share.ranks) == 1 else self._most_alone
        return alone + self._together + share.nbytes

    def add(self, share: Share) -> None:
        if len(share.ranks) > 1:
            self._together += share.nbytes
            return
        self._alone[share.target] += share.nbytes
        self._most_alone = max(self._most_alone, self._alone[share.target])


def _cut(share: Share, specs: Sequence[TensorSpec], slot: int) -> list[Share]:
    """A share that is larger than half of a slot, in parts that are not."""
    row_bytes = share.nbytes // rows(share.box)
    most = max(1, slot // 2 // row_bytes)
    if row_bytes > slot:
        raise ValueError(
            f"resync.bucket_bytes: one row of {specs[share.tensor].name} has {row_bytes} bytes, and a rank sends at "
            f"most {slot} at a time to an engine. Use a larger value."
        )
    parts = pieces(share.box, most)
    return [share._replace(box=box, nbytes=rows(box) * row_bytes) for box in parts]


def _spread(shares: Sequence[Share], sends: Mapping[int, int]) -> list[tuple[float, Share]]:
    """The shares with the fraction of its sender's bytes at which each lies, in that order."""
    before = Counter[int]()
    result = []
    for share in shares:
        result.append(((before[share.source] + share.nbytes / 2) / sends[share.source], share))
        before[share.source] += share.nbytes
    return sorted(result, key=lambda item: item[0])


def _messages(shares: Sequence[Share], specs: Sequence[TensorSpec], sizes: Sequence[int]) -> Round:
    """
    Args:
        sizes: bytes of an element, by tensor.
    """
    grouped: dict[tuple[int, int, tuple[int, ...]], list[Share]] = defaultdict(list)
    for share in shares:
        grouped[share.source, share.target, share.ranks].append(share)
    messages = []
    for (source, target, ranks), members in sorted(grouped.items()):
        members.sort(key=lambda share: -sizes[share.tensor])
        entries = [Entry(specs[share.tensor].name, specs[share.tensor].dtype, share.box) for share in members]
        nbytes = sum([share.nbytes for share in members])
        messages.append(Message(source=source, target=target, ranks=ranks, entries=tuple(entries), nbytes=nbytes))
    return tuple(messages)
