"""Whether two checkpoints are the same model: their configs, their tensors, and on request their logits."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slimrl_tools.compare import Comparison, Limit, compare_checkpoints, limit_of
from slimrl_tools.logits import LogitComparison, compare_logits, compute_logits, random_prompts
from slimrl_tools.model_facts import different_facts
from slimrl_tools.open_checkpoint import FoundCheckpoint, find_checkpoint, open_found
from slimrl_tools.progress import byte_progress

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.family import family_of
from slimrl.models.hf_checkpoint import DequantizingReader
from slimrl.models.safetensors_folder import spec_bytes


@dataclass(frozen=True, kw_only=True)
class LogitRequest:
    num_prompts: int
    num_tokens: int
    """Of each prompt."""
    dtype: str
    """Both models are computed in it: float32 or bfloat16."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Verification:
    a: FoundCheckpoint
    b: FoundCheckpoint
    config: list[str]
    """Facts of the model in which the configs differ."""
    tensors: Comparison
    logits: LogitComparison | None
    ignore_dtype: bool

    @property
    def reasons(self) -> list[str]:
        """What makes the verdict "different"; empty where the two are the same."""
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
        """The verdict."""
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity and no NaN: they are written as words."""
        return _finite(
            {
                "same": self.same,
                "reasons": self.reasons,
                "a": {"path": str(self.a.path), "format": self.a.format},
                "b": {"path": str(self.b.path), "format": self.b.format},
                "config": self.config,
                "tensors": asdict(self.tensors),
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
        tolerance: largest absolute difference that counts as equal; None for what the formats' rounding explains.

    Raises:
        ValueError: one of the two is no checkpoint, or broken; logits of a family that is not supported.
    """
    a, b = _with_configs(find_checkpoint(path_a, hf_dir), find_checkpoint(path_b, hf_dir))
    with open_found(a) as reader_a, open_found(b) as reader_b:
        quantized_a, quantized_b = _quantized(reader_a), _quantized(reader_b)
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
    precision = None
    if logits is not None:
        specs = [*reader_a.specs.values(), *reader_b.specs.values()]
        precision = _precision(logits.dtype, specs if comparison.dtypes else [], quantized_a != quantized_b)
    return Verification(
        a=a,
        b=b,
        config=_config_differences(a, b),
        tensors=comparison,
        logits=None if logits is None or precision is None else _compare_logits(a, b, logits, precision),
        ignore_dtype=ignore_dtype,
    )


def _with_configs(a: FoundCheckpoint, b: FoundCheckpoint) -> tuple[FoundCheckpoint, FoundCheckpoint]:
    """A checkpoint without config.json is taken for one of the other's model, which its tensors must then bear out."""
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
    """Name of each tensor that a checkpoint may hold once more -> its original's; nothing for unknown families."""
    try:
        config = found.hf_config()
        weight_map = family_of(config).weight_map(config, mtp=True)
    except ValueError:
        return {}
    return {copy: tensor.name for tensor in weight_map.hf_tensors.values() for copy in tensor.copies}


def _config_differences(a: FoundCheckpoint, b: FoundCheckpoint) -> list[str]:
    """What the two configs say differently of the model."""
    return different_facts(a.hf_config(), b.hf_config())


def _precision(computed_in: str, specs: list[TensorSpec], quantized: bool) -> str:
    """Which of the limits of logits applies: the coarsest of computation, casts and quantisation.

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
        raise ValueError(
            f"vocabularies of {' and '.join(map(str, sorted(vocab_sizes)))}; their logits are not compared"
        )
    prompts_NT = random_prompts(vocab_sizes.pop(), request.num_prompts, request.num_tokens, request.seed)
    return compare_logits(*(compute_logits(found, prompts_NT, request.dtype) for found in (a, b)), precision)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
