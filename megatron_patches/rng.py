"""The RNG tracker, which gives tensor-parallel ranks different states inside sharded regions."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_patches.patching import patch_attr

DEFAULT_STATE = "default-rng"


def track_the_cpu_generator() -> None:
    """tensor_parallel/random.py reads torch.cuda.default_generators, which is empty without a GPU.

    The CPU generator replaces the GPU's, so that `fork()` swaps its state. `fork()` is replaced too, because Megatron's
    treats a changed CPU state as an error. Without this patch nothing raises, but weights that should be equal on all
    tensor-parallel ranks, such as a router's, differ.
    """
    from megatron.core.tensor_parallel import random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
        return torch.get_rng_state()

    def set_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        assert name in self.states_, f"random state {name} was not added"
        outer_state, outer_name = torch.get_rng_state(), self._current_state_name
        if outer_name != DEFAULT_STATE:
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state if outer_name == DEFAULT_STATE else self.states_[outer_name])
            self._current_state_name = outer_name

    patch_attr(random, "_get_cuda_rng_state", get_state)
    patch_attr(random, "_set_cuda_rng_state", set_state)
    patch_attr(random.CudaRNGStatesTracker, "fork", fork)
