"""The adapters of one linear layer of Megatron: one for each linear layer of Hugging Face's model inside it.

1. x A^T for all of them at once, with the A below each other.
2. What tensor parallelism needs between the two products. It is done on `rank` values of a token, not on `hidden`.
3. The product with one matrix that has the B in the layout of the layer's own weight, zeros elsewhere.

A weight that is not sharded is equal on the ranks that share the layer. Its gradient is whole on each of them but in
two cases: under sequence parallelism each rank has its own tokens, so it carries the mark by which Megatron sums
gradients at the end of an update; in an expert each rank has its own part of the layer and the token dispatcher does
the communication, so the gradient is summed in the backward pass.

T tokens of the layer's input, R the ranks of all adapters together, H its input and F its output features.
"""

import math
from collections.abc import Collection

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slimrl.base.seeds import derive_seed
from slimrl.config.schema.trainer import LoraConfig
from slimrl.models.adapters import adapted_tensors, layer_name
from slimrl.models.weight_map import Entry, HfTensor


class LayerAdapters(nn.Module):
    """Computes what its adapters add to the layer's output. At first B is 0 and A as in PEFT, so that is 0."""

    def __init__(
        self, entry: Entry, weight: Tensor, targets: Collection[str], lora: LoraConfig, *, sequence: bool, seed: int
    ) -> None:
        """
        Args:
            entry: of the layer's weight.
            weight: this rank's shard of it; adapters have its dtype and device.
            targets: names of Hugging Face's linear layers.
            sequence: with sequence parallelism.
            seed: of the run. An adapter depends on it and on its own name, not on the layout.
        """
        super().__init__()
        self.entry, self.rank, self.dropout, self.scale = entry, lora.rank, lora.dropout, lora.alpha / lora.rank
        self.enabled = True
        """Whether the adapters are added; otherwise the layer computes what its own weight gives."""
        self.in_expert = entry.expert is not None
        self.group = mpu.get_expert_tensor_parallel_group() if self.in_expert else mpu.get_tensor_model_parallel_group()
        self.sequence = sequence and not self.in_expert
        shard = entry.rule.shard
        self.by_rows, self.by_columns = (shard is not None and shard.dim == dim for dim in (0, 1))
        self.names = [layer_name(tensor) for tensor in adapted_tensors(entry.rule, targets)]
        for tensor in entry.hf:
            if layer_name(tensor) in self.names:
                self._add(tensor, weight, seed)

    def forward(self, x_TH: Tensor) -> Tensor:
        """The adapters' part of the layer's output, [T, F]; T and F as this rank has them."""
        if self.dropout and self.training:
            x_TH = self._dropped(x_TH)
        a_RH = torch.cat([self.get_parameter(f"{name}_A") for name in self.names])
        b_FR = self._stacked_b()
        if self.in_expert:
            a_RH, b_FR = self._summed_gradients(a_RH, b_FR)
            return self.scale * F.linear(F.linear(x_TH, a_RH), b_FR)
        return self.scale * F.linear(self._communicated(F.linear(x_TH, a_RH)), b_FR)

    @torch.no_grad()
    def delta(self, name: str) -> Tensor:
        """Change of one of Hugging Face's linear layers by its adapter, alpha / rank * B A, float32: this rank's
        shard."""
        return self.scale * (self.get_parameter(f"{name}_B").float() @ self.get_parameter(f"{name}_A").float())

    def sharded_state(self, prefix: str, sharded_offsets: tuple[object, ...], dp_cp_group: object) -> dict[str, object]:
        """The adapters' state for Megatron's checkpoints; see sharded_state_dict of its modules."""
        axes = {f"{name}_B": 0 for name in self.names} if self.by_rows else {}
        axes |= {f"{name}_A": 1 for name in self.names} if self.by_columns else {}
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=dp_cp_group
        )

    def _add(self, tensor: HfTensor, weight: Tensor, seed: int) -> None:
        """Make both matrices of an adapter. PEFT draws A from kaiming_uniform_(a=sqrt(5)): bounds of 1 / sqrt(H)."""
        rows, columns = tensor.shape
        generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", tensor.name))
        bound = 1.0 / math.sqrt(columns)
        a_RH = torch.empty(self.rank, columns).uniform_(-bound, bound, generator=generator)
        parts = self.group.size()
        if self.by_columns:
            a_RH = a_RH.chunk(parts, dim=1)[self.group.rank()].contiguous()
        b_FR = torch.zeros(rows // parts if self.by_rows else rows, self.rank)
        sharded = {"A": self.by_columns, "B": self.by_rows}
        for letter, value in (("A", a_RH), ("B", b_FR)):
            parameter = nn.Parameter(value.to(device=weight.device, dtype=weight.dtype))
            self.register_parameter(f"{layer_name(tensor)}_{letter}", parameter)
            if sharded[letter]:
                set_tensor_model_parallel_attributes(parameter, True, 1 if letter == "A" else 0, 1)
            else:
                parameter.sequence_parallel = self.sequence  # type: ignore[attr-defined]

    def _stacked_b(self) -> Tensor:
        """[F, R]: the matrix of all B in the layout of the layer's own weight."""
        total = self.rank * len(self.names)
        blocks = []
        for tensor in self.entry.rule.hf:
            name = layer_name(tensor)
            if name in self.names:
                before = self.rank * self.names.index(name)
                b_Fr = self.get_parameter(f"{name}_B")
                blocks.append(F.pad(b_Fr, (before, total - before - self.rank)))
            else:
                rows = tensor.shape[0] // (self.group.size() if self.by_rows else 1)
                like = self.get_parameter(f"{self.names[0]}_B")
                blocks.append(like.new_zeros(rows, total))
        return self.entry.rule.op.to_megatron(*blocks)

    def _summed_gradients(self, a_RH: Tensor, b_FR: Tensor) -> tuple[Tensor, Tensor]:
        """Both matrices, with the gradient of the one that is not sharded summed over the ranks that share the
        expert."""
        if self.by_rows:
            return copy_to_tensor_model_parallel_region(a_RH, group=self.group), b_FR
        return a_RH, copy_to_tensor_model_parallel_region(b_FR, group=self.group)

    def _communicated(self, h_TR: Tensor) -> Tensor:
        """The input of the second product, communicated: all tokens for sharded rows, the sum of the partial products
        for sharded columns."""
        if self.group.size() == 1:
            return h_TR
        if self.by_rows:
            if self.sequence:
                return gather_from_sequence_parallel_region(h_TR, tensor_parallel_output_grad=True, group=self.group)
            return copy_to_tensor_model_parallel_region(h_TR, group=self.group)
        if self.by_columns:
            if self.sequence:
                return reduce_scatter_to_sequence_parallel_region(h_TR, group=self.group)
            return reduce_from_tensor_model_parallel_region(h_TR, group=self.group)
        return h_TR

    def _dropped(self, x_TH: Tensor) -> Tensor:
        """The input with dropout: ranks with the same input drop the same values of it, ranks with parts of it their
        own."""
        tracker = megatron_random.get_cuda_rng_tracker()
        if self.in_expert:
            with tracker.fork(megatron_random.get_expert_parallel_rng_tracker_name()):
                return F.dropout(x_TH, self.dropout)
        if self.by_columns or self.sequence:
            with tracker.fork():
                return F.dropout(x_TH, self.dropout)
        return F.dropout(x_TH, self.dropout)
