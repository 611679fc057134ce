"""Precision and formats of numbers."""

from enum import Enum


class Precision(str, Enum):
    fp32 = "fp32"
    """float32 throughout."""
    bf16 = "bf16"
    """bfloat16 weights and activations, float32 main weights."""

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations, as torch prints it without the prefix."""
        return "bfloat16" if self is Precision.bf16 else "float32"

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self is Precision.bf16 else 4


class Fp8Scaling(str, Enum):
    """Which elements share a scale when linear layers of the trainer compute in FP8 (docs/algorithms.md#fp8)."""

    off = "off"
    """No FP8: linear layers compute in `precision`."""
    blockwise = "blockwise"
    """128 x 128 elements of a weight, 128 elements in a row of activations and gradients, all in e4m3: the format of
    engines in block FP8."""
    tensorwise = "tensorwise"
    """The elements of a tensor, by its present largest value; gradients in e5m2."""
    delayed = "delayed"
    """The elements of a tensor, by its largest value in earlier micro-batches; gradients in e5m2."""
    mxfp8 = "mxfp8"
    """32 elements in a row, a power of two, all in e4m3; Blackwell GPUs."""
