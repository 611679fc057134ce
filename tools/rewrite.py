"""Writing a Hugging Face checkpoint that is made from another, file by file, so that it can be interrupted.

1. Each file is written, waited for until it is on the disk, and compared with checksums of the tensors as they were
   made, while the next one is made. Then its record is written, without which `--resume` makes the file again.
2. Index, config, tokenizer and code are added.
3. The whole has the names, shapes and dtypes that it should, and where its values must keep within a limit of the
   source's, they are compared.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.conversion import RECORDS, describe_output, due_files, record_file
from slimrl_tools.exit_codes import CheckFailed
from slimrl_tools.finisher import Finisher
from slimrl_tools.output_folder import check_space, finished, output_folder, refuse_existing
from slimrl_tools.progress import Advance, byte_progress
from slimrl_tools.safetensors_writer import check_file, write_hashed
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.other_files import copy_other_files
from slimrl.models.safetensors_file import spec_bytes
from slimrl.models.safetensors_folder import MAX_SHARD_BYTES, SafetensorsFolder, plan_files, write_index

Produce = Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Tensor]]]
"""Makes the tensors of one output file, in order."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What to write, and how its tensors are made."""

    title: str
    """Of the progress bar: what is done, as the command is called."""
    src: Path
    """Folder whose tokenizer and other files are copied."""
    specs: list[TensorSpec]
    produce: Produce
    config: dict[str, Any]
    """Becomes config.json."""
    job: dict[str, Any]
    """What the output depends on; see output_folder."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    compare: Callable[[Path, Advance], None] | None = None
    """Compares the written folder with the source, counting `nbytes` in all. Raises CheckFailed where they differ."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(map(spec_bytes, self.specs))


def write_checkpoint(rewrite: Rewrite, out: Path, *, resume: bool, check: bool = True) -> None:
    """Write the folder `out`; what an interrupted run of the same job has finished is kept and not made again.

    Args:
        check: read back what was written, that of an earlier run too, and compare it with the source.

    Raises:
        ValueError: `out` exists, or an interrupted run left something else; see output_folder.
        CheckFailed: what was written is not what the source implies; nothing of it is left.
        OSError: the disk is full, or a file reads back differently than it was written; it is made again on a resume.
    """
    files = plan_files(rewrite.specs, rewrite.max_shard_bytes)
    with output_folder(out, rewrite.job, resume=resume) as partial:
        _write_files(rewrite, partial, files, check)
        write_index(partial, files)
        (partial / "config.json").write_text(json.dumps(rewrite.config, indent=2) + "\n")
        copy_other_files(rewrite.src, partial)
        if check:
            _check_whole(rewrite, partial)
        shutil.rmtree(partial / RECORDS)


def run_rewrite(
    rewrite: Rewrite, out: Path, *, dry_run: bool, resume: bool, check: bool, say: Callable[[str], None]
) -> None:
    """Say what is to be written, and write it unless it is a dry run; see `write_checkpoint`."""
    say(describe(rewrite, out))
    if not dry_run:
        write_checkpoint(rewrite, out, resume=resume, check=check)


def describe(rewrite: Rewrite, out: Path) -> str:
    """What `write_checkpoint` would do, in a line.

    Raises:
        ValueError: `out` exists.
    """
    refuse_existing(out)
    num_files = len(plan_files(rewrite.specs, rewrite.max_shard_bytes))
    return describe_output(out, len(rewrite.specs), rewrite.nbytes, num_files)


def _write_files(rewrite: Rewrite, partial: Path, files: Mapping[str, Sequence[TensorSpec]], check: bool) -> None:
    (partial / RECORDS).mkdir(exist_ok=True)
    due = due_files(partial, list(files))
    nbytes = sum(spec_bytes(spec) for name in due for spec in files[name])
    check_space(partial, nbytes)

    title = f"{rewrite.title} and check" if check else rewrite.title
    with (
        byte_progress(title, nbytes + (rewrite.nbytes if check else 0)) as advance,
        Finisher(advance if check else None) as finisher,
    ):
        for name in (name for name in files if check and name not in due):
            _check_again(partial, name, advance)
        for name in due:
            write_hashed(partial, name, files[name], rewrite.produce(files[name]), finisher, advance)


def _check_again(partial: Path, name: str, advance: Advance) -> None:
    """Of an earlier run's file; one that has changed since loses its record, so that the next run makes it again."""
    record = record_file(partial, name)
    try:
        check_file(partial / name, json.loads(record.read_text()), advance)
    except (OSError, ValueError):
        record.unlink()
        raise


def _check_whole(rewrite: Rewrite, partial: Path) -> None:
    """Files hold what was made, so where the whole is wrong none of them is of use, and all are removed."""
    try:
        _check_specs(partial, rewrite.specs)
        if rewrite.compare is not None:
            with byte_progress("compare", rewrite.nbytes) as advance:
                rewrite.compare(partial, advance)
    except CheckFailed:
        for name in finished(partial):
            (partial / name).unlink()
        raise


def _check_specs(partial: Path, specs: Sequence[TensorSpec]) -> None:
    with SafetensorsFolder(partial) as written:
        found = {name: (spec.shape, spec.dtype) for name, spec in written.specs.items()}
    due = {spec.name: (spec.shape, spec.dtype) for spec in specs}
    if found != due:
        first = min(name for name in found.keys() | due.keys() if found.get(name) != due.get(name))
        raise CheckFailed(f"{partial}: {first} is {found.get(first)}, {due.get(first)} was written")
