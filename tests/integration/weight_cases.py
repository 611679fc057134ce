"""One rank's work on checkpoints of small models, shared by the tests of weights and of families."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from groups import leave_groups
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file
from small_models import EXPECTED_NAME as EXPECTED_NAME

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.device import compute_device
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import build_model
from slimrl.trainer.layout.parallel import Layout, init_model_parallel, init_parallel
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.weights import load_hf_weights

TIMEOUT_S = 60.0
DENSE_LAYOUTS_OF_2 = {
    "tp2": ParallelConfig(tensor=2),
    "tp2_sp": ParallelConfig(tensor=2, sequence=True),
    "pp2": ParallelConfig(pipeline=2),
}
DENSE_LAYOUTS_OF_4 = {
    "tp2_sp_pp2": ParallelConfig(tensor=2, sequence=True, pipeline=2),
    "tp2_sp_pp2_vpp2": ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2),
    "pp4": ParallelConfig(pipeline=4),
}
MOE_LAYOUTS_OF_2 = {
    "tp2_sp": ParallelConfig(tensor=2, sequence=True),
    "tp2_sp_etp2": ParallelConfig(tensor=2, sequence=True, expert_tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "ep2": ParallelConfig(expert=2),
    "tp2_sp_ep2_etp1": ParallelConfig(tensor=2, sequence=True, expert=2),
    "etp2": ParallelConfig(expert_tensor=2),
}
MOE_LAYOUTS_OF_4 = {
    "tp2_sp_ep2_dp2": ParallelConfig(tensor=2, sequence=True, expert=2),
    "pp2_ep2": ParallelConfig(pipeline=2, expert=2),
    "tp2_sp_pp2_etp2": ParallelConfig(tensor=2, sequence=True, pipeline=2, expert_tensor=2),
    "tp2_sp_pp2_vpp2_ep2": ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, expert=2),
    "cp2_ep4": ParallelConfig(context=2, expert=4),
}


def join(rank: int, world_size: int, port: int) -> None:
    """Enter the process group; the layout may be changed afterwards."""
    init_parallel(
        ParallelConfig(), rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        timeout_s=TIMEOUT_S, seed=0,
    )  # fmt: skip


def change_layout(parallel: ParallelConfig) -> Layout:
    leave_groups()
    return init_model_parallel(parallel, timeout_s=TIMEOUT_S, seed=0)


def trainer_config(parallel: ParallelConfig, precision: Precision = Precision.fp32) -> TrainerConfig:
    return TrainerConfig(
        parallel=parallel, precision=precision, max_tokens_per_rank=64, optimizer=OptimizerConfig(lr=1e-3)
    )


def loaded_chunks(
    path: Path, parallel: ParallelConfig, precision: Precision = Precision.fp32, *, mtp: bool = False
) -> tuple[Any, ...]:
    """(model chunks, family, config.json) of a checkpoint; `mtp`: with its layers for multi-token prediction."""
    hf_config = read_hf_config(path)
    family = family_of(hf_config)
    chunks = build_model(trainer_config(parallel, precision), family.megatron_config(hf_config), mtp=mtp)
    load_hf_weights(chunks, path, family, hf_config)
    return chunks, family, hf_config


def round_trip(
    rank: int, world_size: int, port: int, cases: Sequence[tuple[Path, dict[str, ParallelConfig]]], mtp: bool = False
) -> Any:
    """Seconds per export by checkpoint and layout; raises where a tensor comes back changed."""
    join(rank, world_size, port)
    seconds = {}
    for path, layouts in cases:
        plain = path / EXPECTED_NAME
        expected = load_file(plain if plain.exists() else path / "model.safetensors")
        for name, parallel in layouts.items():
            change_layout(parallel)
            chunks, family, hf_config = loaded_chunks(path, parallel, mtp=mtp)
            source = MegatronWeightSource(chunks, family, hf_config, window_bytes=40_000)
            start = time.perf_counter()
            seen = {}
            for tensor_name, tensor in source.tensors():
                assert (tensor is None) == (rank != 0)
                seen[tensor_name] = tensor if tensor is None else tensor.to("cpu", copy=True)
            seconds[path.name, name] = time.perf_counter() - start
            assert list(seen) == [spec.name for spec in source.layout()]
            if rank == 0:
                assert set(seen) == set(expected)
                wrong = [key for key, tensor in seen.items() if not torch.equal(tensor, expected[key])]
                assert not wrong, (path.name, name, wrong)
    dist.destroy_process_group()
    return seconds


def packed_logits(
    rank: int,
    world_size: int,
    port: int,
    paths: Sequence[Path],
    tokens_T: torch.Tensor,
    bounds: list[int],
    precision: Precision = Precision.fp32,
) -> list[np.ndarray]:
    """float32 [T, V] of each checkpoint on one rank, sequences packed one after the other."""
    join(rank, world_size, port)
    device = compute_device()
    tokens_T = tokens_T.to(device)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = int(cu_seqlens.diff().max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip
    position_ids_T = torch.cat([torch.arange(int(length), device=device) for length in cu_seqlens.diff()])
    results = []
    for path in paths:
        chunks, _, _ = loaded_chunks(path, ParallelConfig(), precision)
        chunks[0].eval()
        with torch.no_grad():
            logits_1TV = chunks[0](tokens_T[None], position_ids_T[None], None, packed_seq_params=packed)
        results.append(logits_1TV[0].float().cpu().numpy())
    dist.destroy_process_group()
    return results
