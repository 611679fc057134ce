"""What a rank beside the sender sends to the engines: tensors that it holds, from where they lie.

The sender alone speaks with the engines; it has made the group, announces each bucket's tensors, and has them loaded.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from slimrl.data.protocols import EngineError, GroupSpec
from slimrl.models.broadcast_group import BroadcastGroup, GroupError
from slimrl.resync.live import LiveTensors

SENDS = 2
"""Of the sender, which have a deadline each: it may still be at the bucket before."""


class Contribution:
    """Of one rank, for the whole run."""

    def __init__(self) -> None:
        self._spec: GroupSpec | None = None
        self._group: BroadcastGroup | None = None

    def join(self, spec: GroupSpec, source: int) -> None:
        """Meet the engines' receivers, unless this is the group that was joined before.

        Raises:
            EngineError: some have not come within the group's deadline.
        """
        if self._spec == spec:
            return
        self.leave()
        try:
            self._group = BroadcastGroup(spec, 0, source=source)
        except GroupError as error:
            raise EngineError(str(error)) from error
        self._spec = spec

    def send(self, live: LiveTensors) -> None:
        """Returns when this rank's tensors of a bucket are out.

        Raises:
            EngineError: not all engines took them within two deadlines of the group.
        """
        assert self._group is not None
        assert self._spec is not None
        deadline = time.monotonic() + SENDS * self._spec.timeout_s
        try:
            self._group.broadcast(*(live.own[offset] for offset in sorted(live.own)), deadline=deadline)
        except GroupError as error:
            # The others, who wait for what will not come, notice at once.
            self.leave()
            raise EngineError(str(error)) from error

    @contextmanager
    def left_if_broken(self) -> Iterator[None]:
        """Around an attempt at a version: its group is of no use any more when it breaks off."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Let go of the group; does not wait for the others."""
        if self._group is not None:
            self._group.drop()
        self._group = self._spec = None
