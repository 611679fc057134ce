"""One process's share of the files of a torch_dist checkpoint. It needs no Megatron, whose import takes seconds."""

from collections.abc import Sequence
from functools import partial as bind
from pathlib import Path

import torch
from slimrl_tools.conversion import Finisher, record_file
from slimrl_tools.progress import Advance

from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.shard_pieces import Piece
from slimrl.models.torch_dist_files import check_file, read_record, write_file, write_record
from slimrl.models.weight_map import Entry


def write_share(
    src: Path,
    partial: Path,
    entries: Sequence[Entry],
    dtypes: Sequence[torch.dtype],
    files: dict[str, list[Piece]],
    advance: Advance,
) -> None:
    with open_hf_checkpoint(src) as reader, Finisher() as finisher:
        for name, pieces in files.items():
            blocks = write_file(partial / name, pieces, entries, dtypes, reader, advance)
            finisher.add(partial / name, bind(write_record, record_file(partial, name), blocks))


def check_share(partial: Path, names: Sequence[str], advance: Advance) -> None:
    for name in names:
        check_file(partial / name, read_record(record_file(partial, name)), advance)
