"""Models that one rank builds under a layout and loads from Hugging Face's or Megatron's checkpoints."""

from pathlib import Path

import torch
import torch.distributed as dist
from groups import leave_groups

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import build_model, unwrap
from slimrl.trainer.checkpointing.checkpoint import load_weights
from slimrl.trainer.layout.parallel import init_model_parallel, init_parallel
from slimrl.trainer.weights import load_hf_weights

TIMEOUT_S = 60.0


def start(rank: int, world_size: int, port: int) -> None:
    init_parallel(
        ParallelConfig(), rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip


def chunks_of(path: Path, parallel: ParallelConfig, *, mtp: bool = False):
    leave_groups()
    init_model_parallel(parallel, timeout_s=TIMEOUT_S, seed=0)
    hf_config = read_hf_config(path)
    trainer = TrainerConfig(
        parallel=parallel, precision=Precision.fp32, max_tokens_per_rank=64, optimizer=OptimizerConfig(lr=1e-3)
    )
    return build_model(trainer, family_of(hf_config).megatron_config(hf_config), mtp=mtp)


def load_hf(chunks, path: Path) -> None:
    hf_config = read_hf_config(path)
    load_hf_weights(chunks, path, family_of(hf_config), hf_config)


def tensors_of(chunk) -> dict[str, torch.Tensor]:
    """Copies of a model chunk's weights and buffers."""
    state = unwrap(chunk).state_dict()
    return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}


def same_weights(rank, world_size, port, hf, converted, layouts):
    """Raises where a model loaded from the converted checkpoint differs from one loaded from Hugging Face's."""
    start(rank, world_size, port)
    for name, parallel in layouts.items():
        expected = chunks_of(hf, parallel)
        load_hf(expected, hf)
        states = [tensors_of(chunk) for chunk in expected]
        chunks = chunks_of(hf, parallel)
        load_weights(converted, chunks)
        assert len(chunks) == len(states) == (parallel.virtual_pipeline or 1)
        for chunk, state in zip(chunks, states, strict=True):
            found = tensors_of(chunk)
            assert found.keys() == state.keys()
            assert found
            assert not [key for key, tensor in found.items() if not torch.equal(tensor, state[key])], name
    dist.destroy_process_group()
