"""Logits of a checkpoint on random prompts.

transformers runs Hugging Face checkpoints; Megatron loads and runs torch_dist checkpoints. So agreement of the two also
confirms the conversion and both readings of config.json.

N prompts, T tokens each, V rows of the vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from slimrl_tools.open_checkpoint import FoundCheckpoint, open_found
from slimrl_tools.progress import Advance
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.config.wrapper import WRAPPED_IN
from slimrl.models.family import family_of

MAX_FLOAT32 = 1e-4
"""Largest difference of float32 logits of equal weights, relative to the largest logit, or to 1 if that is less."""

RMS_LIMITS = {"float16": 0.03, "bfloat16": 0.15, "block FP8": 0.5}
"""Root mean square of the differences over that of the logits, by the coarsest precision of weights or computation;
unrelated models have about 1.4. A mean, since rounding sends some tokens to another expert and changes their logits by
much."""

GROUP_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class LogitComparison:
    num_tokens: int
    max_abs: float
    largest: float
    """Largest magnitude of a logit."""
    relative_rms: float
    """Root mean square of the differences over that of the logits."""
    greedy_agreement: float
    """Fraction of positions at which both have the same most likely token."""
    precision: str
    """The coarsest precision: float32, or a key of RMS_LIMITS."""

    @property
    def limit(self) -> float:
        """For `max_abs` in float32, for `relative_rms` otherwise."""
        return MAX_FLOAT32 * max(1.0, self.largest) if self.precision == "float32" else RMS_LIMITS[self.precision]

    @property
    def within(self) -> bool:
        return (self.max_abs if self.precision == "float32" else self.relative_rms) <= self.limit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"limit": self.limit, "within": self.within}


def random_prompts(vocab_size: int, num_prompts: int, num_tokens: int, seed: int) -> Tensor:
    """int64 [N, T], uniform over the vocabulary."""
    return torch.randint(vocab_size, (num_prompts, num_tokens), generator=torch.Generator().manual_seed(seed))


def compute_logits(found: FoundCheckpoint, prompts_NT: Tensor, dtype: str, advance: Advance) -> Tensor:
    """float32 [N, T, V] on the CPU; weights and activations are in `dtype`. Holds the whole model.

    Args:
        advance: called after each prompt.

    Raises:
        ValueError: the family is not supported, or weights are missing.
    """
    if found.format == "huggingface":
        return _by_transformers(found, prompts_NT, getattr(torch, dtype), advance)
    return _by_megatron(found, prompts_NT, dtype, advance)


def compare_logits(a_NTV: Tensor, b_NTV: Tensor, precision: str) -> LogitComparison:
    """For float32 logits of two models; `precision`: see LogitComparison."""
    gap_NTV = (a_NTV - b_NTV).nan_to_num(nan=torch.inf)
    size = max(logits.square().mean().sqrt().item() for logits in (a_NTV, b_NTV))
    return LogitComparison(
        num_tokens=a_NTV.shape[0] * a_NTV.shape[1],
        max_abs=gap_NTV.abs().max().item(),
        largest=max(a_NTV.abs().max().item(), b_NTV.abs().max().item()),
        relative_rms=gap_NTV.square().mean().sqrt().item() / size if size else 0.0,
        greedy_agreement=(a_NTV.argmax(-1) == b_NTV.argmax(-1)).float().mean().item(),
        precision=precision,
    )


class _LazyTensor:
    """Read when transformers indexes it, as with a safetensors file."""

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        self._reader, self._name = reader, name

    def __getitem__(self, _: Any) -> Tensor:
        return read_whole(self._reader, self._name)


def _by_transformers(found: FoundCheckpoint, prompts_NT: Tensor, dtype: torch.dtype, advance: Advance) -> Tensor:
    # Imported here, since it takes seconds.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.utils import logging

    from slimrl.device import device_type

    logging.disable_progress_bar()
    hf_config = found.hf_config()
    assert found.hf_dir is not None, "hf_config has raised"
    if WRAPPED_IN in hf_config:
        text = {name: value for name, value in hf_config.items() if name not in (WRAPPED_IN, "model_type")}
        config = AutoConfig.for_model(hf_config["model_type"], **text)
    else:
        config = AutoConfig.from_pretrained(found.hf_dir)
    # The reader has dequantised the weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with open_found(found) as reader:
        names = [name for name in family_of(hf_config).weight_map(hf_config).hf_tensors if name in reader.specs]
        weights: Mapping[str, Any] = {name: _LazyTensor(reader, name) for name in names}
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, loading = model_class.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    if loading["missing_keys"]:
        raise ValueError(f"{found.path}: these weights are missing: {', '.join(sorted(loading['missing_keys'])[:5])}")
    model = model.to(device_type()).eval()
    with torch.no_grad():
        rows = []
        for prompt_T in prompts_NT:
            rows.append(model(prompt_T[None].to(device_type())).logits[0].float().cpu())
            advance(1)
    return torch.stack(rows)


def _by_megatron(found: FoundCheckpoint, prompts_NT: Tensor, dtype: str, advance: Advance) -> Tensor:
    # Imports Megatron, which takes seconds.
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimrl.config.schema.precision import Precision
    from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
    from slimrl.device import compute_device
    from slimrl.trainer.build import build_model
    from slimrl.trainer.checkpointing.checkpoint import load_weights

    hf_config = found.hf_config()
    model = family_of(hf_config).megatron_config(hf_config)
    num_tokens = prompts_NT.shape[1]
    trainer = TrainerConfig(
        parallel=ParallelConfig(),
        precision=next(precision for precision in Precision if precision.dtype == dtype),
        max_tokens_per_rank=num_tokens,
        optimizer=OptimizerConfig(lr=0.0),
    )
    device = compute_device()
    bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
    )
    positions_1T = torch.arange(num_tokens, device=device)[None]
    with _alone():
        (chunk,) = build_model(trainer, model)
        load_weights(found.path, [chunk])
        chunk.eval()
        with torch.no_grad():
            rows = []
            for prompt_T in prompts_NT:
                logits_1TV = chunk(prompt_T[None].to(device), positions_1T, None, packed_seq_params=packed)
                rows.append(logits_1TV[0].float().cpu())
                advance(1)
    return torch.stack(rows)[..., : model.vocab_size]


@contextmanager
def _alone() -> Iterator[None]:
    """Megatron's process groups, of this one process."""
    from slimrl import device
    from slimrl.config.schema.trainer import ParallelConfig
    from slimrl.trainer.layout.parallel import destroy_parallel, init_model_parallel

    device.select_device(0)
    dist.init_process_group(device.collective_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        init_model_parallel(ParallelConfig(), timeout_s=GROUP_TIMEOUT_S, seed=0)
        yield
    finally:
        destroy_parallel()
