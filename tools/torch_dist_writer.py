"""One process's part of the files of a torch_dist checkpoint. It needs no Megatron, whose import takes seconds."""

from collections.abc import Sequence
from functools import partial as bind
from pathlib import Path

import torch
from slimrl_tools.allocator import keep_freed_memory
from slimrl_tools.conversion import due_files, record_file
from slimrl_tools.finisher import Finisher
from slimrl_tools.progress import Advance

from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.shard_pieces import Piece
from slimrl.models.torch_dist_files import Block, check_file, read_record, write_file, write_record
from slimrl.models.weight_map import Entry


def write_part(
    src: Path,
    partial: Path,
    entries: Sequence[Entry],
    dtypes: Sequence[torch.dtype],
    check: bool,
    files: dict[str, list[Piece]],
    advance: Advance,
) -> None:
    """Write those files that are not whole yet, and read all of them back if they are to be checked."""
    keep_freed_memory()
    due = due_files(partial, list(files))
    for name in files.keys() - due if check else ():
        check_file(partial / name, read_record(record_file(partial, name)), advance)

    with open_hf_checkpoint(src) as reader, Finisher(advance if check else None) as finisher:

        def written(file: Path, descriptor: int, block: Block) -> None:
            finisher.written(descriptor, file, block.span)
            advance(block.length)

        for name in due:
            file = partial / name
            blocks = write_file(file, files[name], entries, dtypes, reader, bind(written, file))
            finisher.finish(file, bind(write_record, record_file(partial, name), blocks))
