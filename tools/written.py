"""The check at the end of a command that wrote a checkpoint: what is on the disk is what was made."""

from collections.abc import Sequence
from pathlib import Path

import torch
from slimrl_tools.compare import EXACT, compare_tensors, read_whole
from slimrl_tools.exit_codes import CheckFailed
from slimrl_tools.progress import Advance
from slimrl_tools.rewrite import Produce

from slimrl.data.protocols import TensorSpec
from slimrl.models.safetensors_folder import SafetensorsFolder, spec_bytes


def check_written(out: Path, specs: Sequence[TensorSpec], produce: Produce, advance: Advance) -> None:
    """Make every tensor once more and compare it bit for bit with what a fresh reader of `out` finds.

    Raises:
        CheckFailed: naming the first tensor that is missing or differs.
    """
    with SafetensorsFolder(out) as written:
        found = {name: (spec.shape, spec.dtype) for name, spec in written.specs.items()}
        due = {spec.name: (spec.shape, spec.dtype) for spec in specs}
        if found != due:
            first = min(name for name in found.keys() | due.keys() if found.get(name) != due.get(name))
            raise CheckFailed(f"{out}: {first} is {found.get(first)}, {due.get(first)} was written")
        for spec, (name, tensor) in zip(specs, produce(specs), strict=True):
            expected = tensor.to(getattr(torch, spec.dtype))
            if compare_tensors(name, expected, read_whole(written, name), EXACT) is not None:
                raise CheckFailed(f"{out}: {name} differs from what was written")
            advance(spec_bytes(spec))
