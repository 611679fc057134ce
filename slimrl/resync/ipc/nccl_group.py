"""The NCCL group that carries buckets between GPUs.

- Its kernels run on a stream of their own: no other work of the process waits for them, and they wait for none.
- Torch neither watches it nor ends the process because of it: a member that is late or gone is an error of one
  broadcast, and whoever leaves aborts the group, so no kernel keeps running on the device.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that torch reads when it makes a group; 0: a late broadcast does not end the process."""


class NcclGroup:
    """One member of the group, on the current device."""

    def __init__(self, keys: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(ERROR_HANDLING, "0"):
            self._group: Any = dist.ProcessGroupNCCL(keys, rank, world_size, options)
        self._stream = torch.cuda.Stream()

    def broadcast(self, tensor: Tensor, timeout: timedelta) -> None:
        """Broadcast a tensor from rank 0; returns when the tensor may be written, or read.

        The first one connects the members, for which there is no deadline: a member that is lost meanwhile keeps this
        call waiting, which whoever waits for its thread has to expect.

        Args:
            tensor: no other work on the device may still write it.

        Raises:
            RuntimeError: it did not end in time, and torch has aborted it, or the group was aborted.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.stream(self._stream):
            # With a limit it blocks until the kernel has ended.
            self._group.broadcast([tensor], options).wait(timeout)
            self._stream.synchronize()

    def abort(self) -> None:
        """End a broadcast that is running, in this process alone, and free what the group holds."""
        self._group.abort()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
