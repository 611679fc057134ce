"""Writing a Hugging Face checkpoint that is made from another, file by file, so that it can be interrupted."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from slimrl_tools.output_folder import check_space, output_folder, partial_path
from slimrl_tools.progress import Advance, byte_progress
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.other_files import copy_other_files
from slimrl.models.safetensors_file import read_header, spec_bytes, write_safetensors_file
from slimrl.models.safetensors_folder import MAX_SHARD_BYTES, plan_files, write_index

Produce = Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Tensor]]]
"""Makes the tensors of one output file, in order."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What to write, and how its tensors are made."""

    title: str
    """For the progress bar."""
    src: Path
    """Folder whose tokenizer and other files are copied."""
    specs: list[TensorSpec]
    produce: Produce
    config: dict[str, Any]
    """Becomes config.json."""
    job: dict[str, Any]
    """What the output depends on; see output_folder."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    check: Callable[[Path, Advance], None] | None = None
    """Compares the written folder with the source, counting `nbytes` in all. Raises CheckFailed where they differ."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(map(spec_bytes, self.specs))


def write_checkpoint(rewrite: Rewrite, out: Path, *, resume: bool) -> None:
    """Write the folder `out`; what an interrupted run of the same job has finished is kept and not made again.

    Raises:
        ValueError: `out` exists, or an interrupted run left something else; see output_folder.
        CheckFailed: the check found a difference; the output stays under its temporary name.
        OSError: the disk is full.
    """
    files = plan_files(rewrite.specs, rewrite.max_shard_bytes)
    with output_folder(out, rewrite.job, resume=resume) as partial:
        due = {name: group for name, group in files.items() if not _is_written(partial / name, group)}
        nbytes = sum(spec_bytes(spec) for group in due.values() for spec in group)
        check_space(partial, nbytes)
        with byte_progress(rewrite.title, nbytes) as advance:
            for name, group in due.items():
                write_safetensors_file(partial / name, group, _counted(rewrite.produce(group), group, advance))
        write_index(partial, files)
        (partial / "config.json").write_text(json.dumps(rewrite.config, indent=2) + "\n")
        copy_other_files(rewrite.src, partial)
        if rewrite.check is not None:
            with byte_progress("check", rewrite.nbytes) as advance:
                rewrite.check(partial, advance)


def describe(rewrite: Rewrite, out: Path) -> str:
    """What `write_checkpoint` would do, in a line.

    Raises:
        ValueError: `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")
    count = len(plan_files(rewrite.specs, rewrite.max_shard_bytes))
    begun = f", continuing {partial_path(out)}" if partial_path(out).exists() else ""
    return f"{out}: {len(rewrite.specs)} tensors, {decimal(rewrite.nbytes)} in {count} files{begun}"


def _is_written(file: Path, specs: Sequence[TensorSpec]) -> bool:
    """Whether a file is there from an earlier run; a file under its final name is whole, which its header confirms."""
    if not file.exists():
        return False
    found = {place.spec for place in read_header(file).values()}
    return found == {TensorSpec(name=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in specs}


def _counted(
    tensors: Iterable[tuple[str, Tensor]], specs: Sequence[TensorSpec], advance: Advance
) -> Iterator[tuple[str, Tensor]]:
    for spec, item in zip(specs, tensors, strict=True):
        yield item
        advance(spec_bytes(spec))
