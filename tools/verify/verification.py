"""Compares two checkpoints: their configs, their tensors, and on request their logits."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slimrl_tools.inspect.model_facts import different_facts
from slimrl_tools.open_checkpoint import FoundCheckpoint, find_checkpoint, open_found
from slimrl_tools.progress import byte_progress, count_progress
from slimrl_tools.verify.compare import Comparison, Limit, compare_checkpoints, limit_of
from slimrl_tools.verify.logits import LogitComparison, compare_logits, compute_logits, random_prompts

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.hf_checkpoint import DequantizingReader, form_of, left_out_note
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.wrapped_folder import add_carried
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of


@dataclass(frozen=True, kw_only=True)
class LogitRequest:
    num_prompts: int
    num_tokens: int
    """Length of each prompt."""
    dtype: str
    """Precision of both models: float32 or bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    a: FoundCheckpoint
    b: FoundCheckpoint
    config: list[str]
    """Differences between the configs."""
    tensors: Comparison
    logits: LogitComparison | None
    ignore_dtype: bool
    left_out: list[str]
    """Lines on tensors that were not compared, because no model reads them."""

    @property
    def reasons(self) -> list[str]:
        """Kinds of differences; empty if the two are the same."""
        found = self.tensors
        reasons = {
            "configs": len(self.config),
            "missing tensors": len(found.missing),
            "additional tensors": len(found.extra),
            "shapes": len(found.shapes),
            "dtypes": 0 if self.ignore_dtype else len(found.dtypes),
            "values": found.num_exceeding,
            "logits": int(self.logits is not None and not self.logits.within),
        }
        return [name for name, count in reasons.items() if count]

    @property
    def same(self) -> bool:
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with infinity and NaN as strings."""
        return _finite(
            {
                "same": self.same,
                "reasons": self.reasons,
                "a": {"path": str(self.a.path), "format": self.a.format},
                "b": {"path": str(self.b.path), "format": self.b.format},
                "config": self.config,
                "tensors": asdict(self.tensors),
                "left_out": self.left_out,
                "logits": None if self.logits is None else self.logits.as_dict(),
            }
        )


def verify(
    path_a: Path,
    path_b: Path,
    *,
    hf_dir: Path | None = None,
    tolerance: float | None = None,
    ignore_dtype: bool = False,
    logits: LogitRequest | None = None,
) -> Verification:
    """Compare two checkpoints in any two formats. Holds one tensor of each; with `logits` one whole model at a time.

    Args:
        hf_dir: folder with config.json, for torch_dist checkpoints that have none; else the other checkpoint's is used.
        tolerance: largest absolute difference that counts as equal; None for the rounding of the formats.

    Raises:
        ValueError: one of the two is no checkpoint or broken, or logits are asked of a family that is not supported.
    """
    a, b = _with_configs(find_checkpoint(path_a, hf_dir), find_checkpoint(path_b, hf_dir))
    with open_found(a) as reader_a, open_found(b) as reader_b:
        if a.format == b.format == "huggingface":
            for reader in (reader_a, reader_b):
                add_carried(reader, form_of(reader))
        quantized_a, quantized_b = _quantized(reader_a), _quantized(reader_b)
        notes = [note for reader in (reader_a, reader_b) if (note := left_out_note(reader))]
        nbytes = sum(map(spec_bytes, reader_a.specs.values()))
        with byte_progress("compare", nbytes) as advance:
            comparison = compare_checkpoints(
                reader_a,
                reader_b,
                _limits(quantized_a, quantized_b, tolerance),
                copies=_copies(a),
                in_order_of_b=b.format == "torch_dist",
                advance=advance,
            )
    logit_comparison = None
    if logits is not None:
        specs = [*reader_a.specs.values(), *reader_b.specs.values()] if comparison.dtypes else []
        precision = _precision(logits.dtype, specs, quantized_a != quantized_b)
        logit_comparison = _compare_logits(a, b, logits, precision)
    return Verification(
        a=a,
        b=b,
        config=different_facts(a.hf_config(), b.hf_config()),
        tensors=comparison,
        logits=logit_comparison,
        ignore_dtype=ignore_dtype,
        left_out=notes,
    )


def _with_configs(a: FoundCheckpoint, b: FoundCheckpoint) -> tuple[FoundCheckpoint, FoundCheckpoint]:
    """A checkpoint without config.json gets the other's; its tensors must match it."""
    return replace(a, hf_dir=a.hf_dir or b.hf_dir), replace(b, hf_dir=b.hf_dir or a.hf_dir)


def _quantized(reader: CheckpointReader) -> frozenset[str]:
    return reader.quantized if isinstance(reader, DequantizingReader) else frozenset()


def _limits(
    quantized_a: frozenset[str], quantized_b: frozenset[str], tolerance: float | None
) -> Callable[[TensorSpec, TensorSpec], Limit]:
    if tolerance is not None:
        limit = Limit(reason="--tolerance", absolute=tolerance)
        return lambda a, b: limit
    return lambda a, b: limit_of(a, b, quantised=(a.name in quantized_a) != (b.name in quantized_b))


def _copies(found: FoundCheckpoint) -> dict[str, str]:
    """Name of a copy -> name of its original; empty for unknown families."""
    try:
        config = found.hf_config()
        return family_of(config).weight_map(config, mtp=True).originals
    except ValueError:
        return {}


def _precision(computed_in: str, specs: list[TensorSpec], quantized: bool) -> str:
    """The coarsest precision of computation, casts and quantisation, which sets the limit of logits.

    Args:
        specs: of all tensors, if the checkpoints' dtypes differ.
    """
    if quantized:
        return "block FP8"
    dtypes = {computed_in, *(spec.dtype for spec in specs)}
    return next(dtype for dtype in ("bfloat16", "float16", "float32") if dtype in dtypes)


def _compare_logits(a: FoundCheckpoint, b: FoundCheckpoint, request: LogitRequest, precision: str) -> LogitComparison:
    vocab_sizes = {int(found.hf_config()["vocab_size"]) for found in (a, b)}
    if len(vocab_sizes) > 1:
        sizes = " and ".join(map(str, sorted(vocab_sizes)))
        raise ValueError(f"--logits: the vocabularies differ, {sizes} tokens")
    prompts_NT = random_prompts(vocab_sizes.pop(), request.num_prompts, request.num_tokens, seed=0)
    with count_progress("logits", 2 * request.num_prompts, "prompts") as advance:
        a_NTV, b_NTV = (compute_logits(found, prompts_NT, request.dtype, advance) for found in (a, b))
    return compare_logits(a_NTV, b_NTV, precision)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
