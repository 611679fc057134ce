"""A tiny Qwen3-MoE, fixed packed data and one rank's work on it, shared by the trainer's integration tests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from groups import leave_groups, take_apart
from megatron.core import dist_checkpointing

from slimrl import device
from slimrl.algorithms.objective import LossSums, cross_entropy, loss_function
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.data.packing import MicroBatch, pack
from slimrl.data.trajectory import Segment
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.trainer.build import build_model, unwrap
from slimrl.trainer.layout.parallel import Layout, destroy_parallel, init_model_parallel, init_parallel
from slimrl.trainer.local_batch import LocalBatch
from slimrl.trainer.micro_batch_runner import MicroBatchRunner, UpdateResult, ValueRunner
from slimrl.trainer.mtp import MtpLoss
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.value_head import is_value_head

VOCAB, LAYERS = 101, 4
"""An odd vocabulary: its padding differs between tensor-parallel sizes."""


def model_config(**sizes: Any) -> MegatronModelConfig:
    """`sizes` replace those of the transformer below."""
    return MegatronModelConfig(
        transformer={
            "num_layers": LAYERS,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "qk_layernorm": True,
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "moe_router_load_balancing_type": "none",
            "init_method_std": 0.1,
            **sizes,
        },
        multi_latent_attention=False,
        vocab_size=VOCAB,
        rotary_base=10000.0,
        rotary_percent=1.0,
        tie_embeddings=False,
        max_position=256,
        mtp_layers=2,
    )


def trainer_config(num_ranks: int = 1, **settings: Any) -> TrainerConfig:
    """`settings` go to the parallel layout where they are its fields, to the trainer otherwise."""
    parallel = {name: settings.pop(name) for name in list(settings) if hasattr(ParallelConfig(), name)}
    defaults = {
        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.01),
        "precision": Precision.fp32,
        "max_tokens_per_rank": 128,
        "logprob_chunk_tokens": 48,
    }
    return TrainerConfig(num_ranks=num_ranks, parallel=ParallelConfig(**parallel), **{**defaults, **settings})


def sequences(step: int, count: int = 12) -> tuple[list[Segment], np.ndarray]:
    """Random sequences of 9 to 57 tokens, and an advantage for each."""
    rng = np.random.default_rng(1000 + step)
    packed = []
    for _ in range(count):
        length = int(rng.integers(9, 58))
        mask = rng.random(length) < 0.6
        segment = Segment.not_sampled(rng.integers(0, VOCAB, length), mask)
        packed.append(replace(segment, rollout_logprobs=rng.normal(-4, 0.1, length).astype(np.float32)))
    return packed, rng.normal(size=count).astype(np.float32)


def packed_batches(step: int, layout: Layout, budget_tokens: int, count: int = 12) -> list[MicroBatch]:
    """This rank's micro-batches of one update, of `count` sequences."""
    packed, advantages_N = sequences(step, count)
    parts = pack(
        [[segment] for segment in packed],
        advantages_N,
        budget_tokens=budget_tokens * layout.context,
        alignment=layout.alignment,
        data_parallel=layout.data,
        micro_batch_multiple=layout.micro_batch_multiple,
    )
    return parts[layout.data_rank]


def gspo(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, batch: LocalBatch) -> LossSums:
    """Old log-probs are the rollout's, so that ratios leave 1."""
    batch = replace(batch, added_T={"old_logprobs": batch.rollout_logprobs_T})
    return loss_function("policy", AlgorithmConfig(clip_low=0.9, clip_high=5.0))(logprobs_T, entropy_T, batch)


def token_cross_entropy(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, batch: LocalBatch) -> LossSums:
    sums = cross_entropy(logprobs_T, entropy_T, batch)
    entropy = torch.where(batch.mask_T, entropy_T, 0.0).sum().detach()
    return replace(sums, reported={**sums.reported, "entropy": entropy})


LOSSES = {"cross_entropy": token_cross_entropy, "gspo": gspo}


class Run:
    """One rank of a trainer of the tiny model, starting from saved weights if any."""

    def __init__(
        self,
        trainer: TrainerConfig,
        layout: Layout,
        weights: str | None,
        model: MegatronModelConfig | None = None,
        *,
        critic: bool = False,
    ) -> None:
        self.trainer, self.layout = trainer, layout
        model = model or model_config()
        self.chunks = build_model(trainer, model, mtp=trainer.mtp.train, critic=critic)
        if weights is not None:
            self._load(weights)
        self.optimizer = Optimizer(trainer, self.chunks, total_updates=10)
        self.runner = (ValueRunner if critic else MicroBatchRunner)(
            self.chunks,
            self.optimizer,
            layout,
            vocab_size=VOCAB,
            chunk_tokens=trainer.logprob_chunk_tokens,
            mtp=MtpLoss(model.mtp_layers, trainer.mtp.loss_weight) if trainer.mtp.train else None,
        )

    def update(self, step: int, loss: str = "cross_entropy") -> UpdateResult:
        batches = packed_batches(step, self.layout, self.trainer.max_tokens_per_rank)
        return self.runner.train_update(batches, LOSSES[loss], denominator=100.0, temperature=0.7)

    def _state(self) -> dict[str, Any]:
        return {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(self.chunks)}

    def save_weights(self, path: str) -> None:
        Path(path).mkdir()
        dist_checkpointing.save(self._state(), path)

    def _load(self, path: str) -> None:
        state = {
            model: {name: item for name, item in part.items() if not is_value_head(unwrap(chunk), name)}
            for (model, part), chunk in zip(self._state().items(), self.chunks, strict=True)
        }
        loaded = dist_checkpointing.load(state, path)
        for i, chunk in enumerate(self.chunks):
            missing, _ = unwrap(chunk).load_state_dict(loaded[f"model{i}"], strict=False)
            assert all(is_value_head(unwrap(chunk), name) for name in missing), missing


def weight_storages(run: Run) -> dict[int, torch.UntypedStorage]:
    return {p.untyped_storage()._cdata: p.untyped_storage() for chunk in run.chunks for p in chunk.parameters()}


def weight_bytes(run: Run) -> int:
    return sum(storage.nbytes() for storage in weight_storages(run).values())


def gradient_bytes(run: Run) -> int:
    buffers = [buffer for chunk in run.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def optimizer_bytes(run: Run) -> int:
    """Device memory of the optimizer's tensors that the model does not share, as float32 training's main weights are.

    The numbers of updates that torch's Adam keeps for each parameter are on the host.
    """
    tensors = [tensor for tensor in run.optimizer.tensors() if tensor.device.type == device.device_type()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum(storage.nbytes() for storage in storages if storage._cdata not in weight_storages(run))


def save_initial_weights(rank: int, num_ranks: int, port: int, path: str, **settings: Any) -> None:
    layout = start(trainer_config(), rank, num_ranks, port)
    Run(trainer_config(**settings), layout, None).save_weights(path)
    destroy_parallel()


def start(trainer: TrainerConfig, rank: int, num_ranks: int, port: int) -> Layout:
    return init_parallel(
        trainer.parallel,
        rank=rank,
        world_size=num_ranks,
        meeting=f"tcp://127.0.0.1:{port}",
        timeout_s=60,
        seed=7,
    )


def in_layouts(
    rank: int,
    num_ranks: int,
    port: int,
    layouts: Sequence[dict[str, Any]],
    weights: str | None,
    *,
    critic: bool = False,
) -> Iterator[Run]:
    """A run under each of several layouts of equally many ranks, one after another in one process group."""
    for number, settings in enumerate(layouts):
        trainer = trainer_config(num_ranks, **settings)
        if number == 0:
            layout = start(trainer, rank, num_ranks, port)
        else:
            leave_groups()
            layout = init_model_parallel(trainer.parallel, timeout_s=60, seed=7)
        run = Run(trainer, layout, weights, critic=critic)
        yield run
        take_apart(run.chunks)
    destroy_parallel()


def run_layouts(
    rank: int, num_ranks: int, port: int, weights: str, cases: list[tuple[dict[str, Any], str]], steps: int
) -> list[list[UpdateResult]]:
    """Several layouts of equally many ranks one after another in one process group, `steps` updates each."""
    runs = in_layouts(rank, num_ranks, port, [settings for settings, _ in cases], weights)
    return [[run.update(step, loss) for step in range(steps)] for run, (_, loss) in zip(runs, cases, strict=True)]
