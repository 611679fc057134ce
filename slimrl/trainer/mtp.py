"""Training of layers for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Layer k computes h_k = norm(layer(eh_proj [enorm(emb(x_t+k)); hnorm(h_k-1)])), where h_0 is the model's last hidden
state; the model's output layer makes logits for token t + k + 1 of h_k. The layers learn from the model and not the
other way round: h_0, the embedding and the output layer get no gradient from them.

T tokens of a micro-batch on this rank, D layers, V rows of the vocabulary shard.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor

from slimrl import device
from slimrl.data.mtp_targets import count_targets
from slimrl.data.packing import MicroBatch
from slimrl.trainer.local_batch import LocalBatch

LAYER_INPUTS = (
    "position_ids",
    "attention_mask",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "packed_seq_params",
    "sequence_len_offset",
    "padding_mask",
)
"""Names of the inputs that these layers get as the model's own layers do."""

LossOutcome = tuple[Tensor, Tensor, dict[str, Tensor]]
"""(loss, number of tokens, what is reported), which a micro-batch's loss function returns to Megatron's schedule."""


class ShiftedMtpLayer(MultiTokenPredictionLayer):
    """A layer that reads tokens which are shifted already. Megatron's would shift them here, one packed sequence after
    another and with messages between context-parallel ranks."""

    def _get_embeddings(
        self, input_ids: Tensor, position_ids: Tensor, embedding: Any, hidden_states: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Embed the first row of `input_ids` [D, T] without gradient, and leave the others to the next layers."""
        with torch.no_grad():
            embedded = embedding(input_ids=input_ids[:1], position_ids=position_ids)
        if not hidden_states.requires_grad:
            # A layer that is recomputed needs an input with a gradient.
            hidden_states.requires_grad_()
        return input_ids[1:], position_ids, options.get("padding_mask"), embedded, hidden_states


class GptWithMtp(GPTModel):
    """A model that returns the logits of its layers for multi-token prediction together with its own, for a loss
    outside of the model.

    Megatron's model would compute their loss itself, as a mean over each micro-batch.
    """

    def _postprocess(
        self, hidden_states: Tensor, *, output_processor_context: Tensor | None = None, **inputs: Any
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """
        Args:
            output_processor_context: int64 [D, T], the tokens that the layers read; None to leave them out. Forward
                passes this argument on as it is.

        Returns:
            Logits [1, T, V] on the last pipeline stage, and if there are tokens those of each layer; hidden states on
            other stages.
        """
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_1TV = self._logits(hidden_states, weight)
        if output_processor_context is None:
            return logits_1TV
        states = self.mtp(
            input_ids=output_processor_context,
            hidden_states=hidden_states,
            embedding=self.embedding,
            **{name: inputs[name] for name in LAYER_INPUTS},
        )
        frozen = (self.output_layer.weight if weight is None else weight).detach()
        of_layers = states.chunk(1 + self.config.mtp_num_layers)[1:]
        return logits_1TV, [self._logits(states_T1H, frozen) for states_T1H in of_layers]

    def _logits(self, states_T1H: Tensor, weight: Tensor | None) -> Tensor:
        logits_T1V, _ = self.output_layer(states_T1H, weight=weight)
        return logits_T1V.transpose(0, 1).contiguous()


def mtp_block_spec(config: Any, decoder_spec: Any, fused: bool, vp_stage: int | None) -> Any:
    """Megatron's specification of the layers, with tokens shifted outside; None if this stage has none."""
    spec = get_gpt_mtp_block_spec(config, decoder_spec, fused, vp_stage=vp_stage)
    for layer in spec.layer_specs if spec is not None else ():
        layer.module = ShiftedMtpLayer
    return spec


class MtpLoss:
    """Mean over the layers of each layer's mean of -log p over its sampled targets, times a weight."""

    def __init__(self, num_layers: int, weight: float) -> None:
        self.num_layers, self.weight = num_layers, weight
        self._shares: list[float] = []
        self._scale = 0.0

    def start_update(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> None:
        """Count the targets of an update over all data-parallel ranks; every rank calls it.

        Args:
            num_tokens: of the update on all ranks, by which Megatron divides the gradients.
        """
        counts_D = torch.zeros(self.num_layers, dtype=torch.int64, device=device.compute_device())
        for batch in micro_batches:
            counts_D += torch.from_numpy(count_targets(batch, self.num_layers)).to(counts_D.device)
        dist.all_reduce(counts_D, group=mpu.get_data_parallel_group())
        self._shares = (1 / (self.num_layers * counts_D.clamp(min=1).double())).tolist()
        self._scale = self.weight * num_tokens

    def add(self, outcome: LossOutcome, logprobs: Sequence[Tensor], batch: LocalBatch) -> LossOutcome:
        """Add a micro-batch's part of the loss, and report it as `mtp_loss`, whose sum over the update is the mean.

        Args:
            logprobs: float32 [T] of each layer's targets; those that are masked may be NaN.
        """
        assert batch.mtp is not None
        loss, count, reported = outcome
        mean = torch.zeros_like(loss)
        for share, logprobs_T, mask_T in zip(self._shares, logprobs, batch.mtp.mask_DT, strict=True):
            mean = mean - torch.where(mask_T, logprobs_T, 0.0).sum() * share
        return loss + mean * self._scale, count, {**reported, "mtp_loss": mean.detach()}
