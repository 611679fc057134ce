"""Writes a Hugging Face checkpoint that is made from others or a GGUF file, file by file, so that it can be resumed.

1. Each file is written, flushed and compared with the checksums of its tensors while the next one is made. Then its
   record is written, without which `--resume` writes the file again.
2. Index, config, tokenizer and code are added.
3. Names, shapes and dtypes are checked. Values that may differ from the source's within a limit are compared.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slimrl_tools.convert.conversion import Say, Written, describe_output, write_in_parallel
from slimrl_tools.convert.output_folder import check_new, finished, output_folder, source_files
from slimrl_tools.convert.safetensors_writer import write_hashed
from slimrl_tools.exit_codes import CheckFailed
from slimrl_tools.progress import Advance, byte_progress
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import (
    MAX_SHARD_BYTES,
    SafetensorsFolder,
    plan_safetensors_files,
    write_index,
)
from slimrl.checkpoints.wrapped_folder import whole_specs, whole_tensors
from slimrl.data.model_weights import TensorSpec
from slimrl.models.hf_config import write_hf_config


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A checkpoint to write, and how its tensors are made."""

    command: str
    sources: list[Path]
    """Checkpoints, or one file, from which it is made."""
    specs: list[TensorSpec]
    produce: Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Tensor]]]
    """Makes the tensors of one file, in order."""
    config: dict[str, Any]
    """Becomes config.json."""
    form: CheckpointReader | None = None
    """A wrapped checkpoint, open until all is written, whose form the output has and whose other tensors it repeats."""
    options: dict[str, Any] = field(default_factory=dict)
    """The command's options; a resumed run must have the same."""
    add_files: Callable[[Path], None] | None = None
    """Writes tokenizer and other files into the folder; None to copy the first source's."""
    compare: Callable[[Path, Advance], None] | None = None
    """Compares the written folder with the source, and advances by the bytes of all `specs`. Raises CheckFailed."""


def write_checkpoint(
    rewrite: Rewrite,
    out: Path,
    *,
    shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    resume: bool = False,
    check: bool = True,
    say: Say = print,
) -> None:
    """Describe the output and, without `dry_run`, write it.

    Args:
        shard_bytes: tensor bytes per file at most; a larger tensor gets a file of its own.
        resume: keep the files that an interrupted run of the same command has finished.
        check: read back all files, those of an earlier run too, and compare them with the source.

    Raises:
        ValueError: `out` exists, or an interrupted run was another job; see output_folder.
        CheckFailed: the result does not match the source; all of its files are removed.
        OSError: the disk is full, or a file reads back differently, which a resumed run writes again.
    """
    check_new(out)
    text, produce = rewrite.specs, rewrite.produce
    rewrite = replace(
        rewrite,
        specs=whole_specs(rewrite.form, text),
        produce=lambda group: whole_tensors(rewrite.form, group, text, produce),
    )
    files = plan_safetensors_files(rewrite.specs, shard_bytes)
    sizes = {name: sum(map(spec_bytes, specs)) for name, specs in files.items()}
    say(describe_output(out, len(rewrite.specs), sizes))
    if dry_run:
        return
    job = {
        "command": rewrite.command,
        "sources": [[str(path.resolve()), source_files(path)] for path in rewrite.sources],
        "shard_bytes": shard_bytes,
        **rewrite.options,
    }
    with output_folder(out, job, resume=resume) as partial:

        def write(file: Path, specs: Sequence[TensorSpec], written: Written) -> None:
            write_hashed(file, specs, rewrite.produce(specs), written)

        write_in_parallel(lambda: nullcontext(write), files, sizes, partial, title=rewrite.command, check=check)
        write_index(partial, files)
        write_hf_config(partial, rewrite.config)
        if rewrite.add_files is None:
            copy_other_files(rewrite.sources[0], partial)
        else:
            rewrite.add_files(partial)
        if check:
            _check_result(rewrite, partial, sum(sizes.values()))


def _check_result(rewrite: Rewrite, partial: Path, nbytes: int) -> None:
    """The files match their checksums, so if the result is wrong, none of them is of use and all are removed."""
    try:
        _check_specs(partial, rewrite.specs)
        if rewrite.compare is not None:
            with byte_progress("compare", nbytes) as advance:
                rewrite.compare(partial, advance)
    except CheckFailed:
        for name in finished(partial):
            (partial / name).unlink()
        raise


def _check_specs(partial: Path, specs: Sequence[TensorSpec]) -> None:
    with SafetensorsFolder(partial) as written:
        found = {name: (spec.shape, spec.dtype) for name, spec in written.specs.items()}
    expected = {spec.name: (spec.shape, spec.dtype) for spec in specs}
    if found != expected:
        first = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise CheckFailed(f"{partial}: {first} reads back as {found.get(first)}, {expected.get(first)} was written")
