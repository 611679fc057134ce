"""Any rank of any layout in one process, without other processes, with Megatron's modules on the meta device.

Collectives of the default group do nothing (torch's "fake" backend), and the current CUDA device is the meta device,
where tensors have a shape and a dtype but no memory. Building one of a thousand ranks takes a fraction of a second, so
a laptop can examine a whole layout.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import random as megatron_random
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimrl.config.schema.trainer import ParallelConfig
from slimrl.trainer.layout.parallel import make_groups, seed_ranks


@contextmanager
def fake_world(parallel: ParallelConfig, *, rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a fake world; modules built in the block are on the meta device.

    At the end groups, random-number states and the current device are restored. Garbage collection pauses in the block,
    since walking through all modules built so far would take four fifths of the time.

    Raises:
        ValueError: the world does not divide into this layout.
    """
    assert not dist.is_initialized(), "this process is a rank of a real world"
    random_state, tracker = torch.get_rng_state(), megatron_random.get_cuda_rng_tracker()
    tracker_states = tracker.get_states()
    real_current_device, collecting = torch.cuda.current_device, gc.isenabled()
    gc.disable()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        try:
            make_groups(parallel, create_gloo_process_groups=False)
        except RuntimeError as error:
            raise ValueError(f"{world_size} ranks do not divide into the layout: {error}") from error
        seed_ranks(0)
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.current_device = real_current_device
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
        tracker.set_states(tracker_states)
        torch.set_rng_state(random_state)
        if collecting:
            gc.enable()
