"""A linear layer that every tensor-parallel rank holds whole, for Megatron's own layers of sparse attention.

post_training/modelopt/layers.py has one, but where it is told that it is duplicated it forgets the group, and every
rank of it writes its weight into a checkpoint as the only copy.
"""

from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.post_training.modelopt.layers import Linear


class ReplicatedLinear(Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp_group = mpu.get_tensor_model_parallel_group()
