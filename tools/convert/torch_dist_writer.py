"""Writes the files of a torch_dist checkpoint in one process. It needs no Megatron, whose import takes seconds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from slimrl_tools.allocator import keep_freed_memory
from slimrl_tools.convert.conversion import WriteFile

from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.torch_dist.chunks import Chunk
from slimrl.checkpoints.torch_dist.files import write_distcp_file
from slimrl.models.weight_map import Entry


@contextmanager
def distcp_writer(
    src: Path, entries: Sequence[Entry], dtypes: Sequence[torch.dtype]
) -> Iterator[WriteFile[list[Chunk]]]:
    """From a Hugging Face checkpoint."""
    keep_freed_memory()
    with open_hf_checkpoint(src) as reader:
        yield lambda file, chunks, written: write_distcp_file(file, chunks, entries, dtypes, reader, written)
