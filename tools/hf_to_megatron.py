"""A Hugging Face checkpoint as a torch_dist checkpoint, which Megatron loads under any layout.

1. The source is compared with its config.json, and the layout with the model.
2. The schema of the layout says what is stored; its pieces are cut into files.
3. Processes write the files, tensor by tensor, straight from slices of the source.
4. Every file is read back and compared with the checksums of what was written.
5. Metadata, the model's facts, its config and tokenizer are added, and the folder gets its name.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from slimrl_tools.conversion import (
    RECORDS,
    Options,
    Plan,
    Say,
    record_file,
    run_plan,
)
from slimrl_tools.output_folder import output_folder, refuse_existing, source_files
from slimrl_tools.torch_dist_writer import write_part

from slimrl.config.model_rules import model_violations
from slimrl.config.schema import ParallelConfig, Recipe, TrainerConfig
from slimrl.data.protocols import TensorSpec
from slimrl.models.architecture import FACTS_FILE, HF_SUBFOLDER, architecture_of
from slimrl.models.checkpoint import check_tensors
from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.family import family_of
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import plain_config, read_hf_config
from slimrl.models.other_files import copy_other_files
from slimrl.models.safetensors_file import element_bytes
from slimrl.models.shard_pieces import ShardSchema
from slimrl.models.torch_dist_files import FILE_BYTES, piece_bytes, plan_files, read_record
from slimrl.models.weight_map import Entry
from slimrl.trainer.fake_world import smallest_world
from slimrl.trainer.shard_schema import shard_schema
from slimrl.trainer.torch_dist import TorchDistCheckpoint
from slimrl.trainer.torch_dist_metadata import write_metadata

COPIES_HELD = 3
"""Largest shards that a process holds: see `write_file`."""


def hf_to_megatron(
    src: Path,
    out: Path,
    parallel: ParallelConfig,
    options: Options,
    *,
    file_bytes: int = FILE_BYTES,
    dry_run: bool = False,
    say: Say = print,
) -> None:
    """Convert, or only say what would be written.

    Args:
        file_bytes: tensor bytes per file at most; a larger shard gets a file of its own.

    Raises:
        ValueError: the source, the layout or the output folder is not what it should be; nothing was written.
        OSError: the disk is full, or what was written reads back differently.
    """
    refuse_existing(out)
    config = read_hf_config(src)
    _check_layout(config, parallel)
    with open_hf_checkpoint(src) as reader:
        mtp = check_tensors(reader, family_of(config), config)
        schema = shard_schema(config, tensor=parallel.tensor, expert_tensor=parallel.expert_tensor, mtp=mtp)
        dtypes = [_stored_dtype(entry, reader, options.dtype) for entry in schema.weight_map.entries]
        largest = _largest_shard(schema, dtypes, reader)
    files = plan_files(schema, dtypes, file_bytes)
    plan = Plan(
        out=out,
        num_tensors=len({piece.key for piece in schema.pieces}),
        files={name: sum(piece_bytes(piece, dtypes) for piece in pieces) for name, pieces in files.items()},
        largest_bytes=largest,
        copies_held=COPIES_HELD,
    )
    if dry_run:
        say(plan.describe(options.processes))
        return
    job = {
        "command": "convert hf-to-megatron",
        "source": source_files(src),
        "layout": asdict(parallel),
        "dtype": options.dtype,
        "file_bytes": file_bytes,
    }
    with output_folder(out, job, resume=options.resume) as partial:
        convert = bind(write_part, src, partial, schema.weight_map.entries, dtypes, options.check)
        run_plan(convert, plan, files, partial, options)
        records = {name: read_record(record_file(partial, name)) for name in files}
        write_metadata(partial, schema, dtypes, records)
        _check_result(partial, config, schema, dtypes)
        _write_facts(src, partial, config, parallel, options.dtype)
        shutil.rmtree(partial / RECORDS)


def _check_layout(config: dict[str, Any], parallel: ParallelConfig) -> None:
    """Layers need not divide over pipeline stages, whose layout may be uneven and makes no difference here.

    There are no ranks here that a size would have to divide; 0 is a multiple of every size.
    """
    recipe = Recipe(trainer=TrainerConfig(num_ranks=0, parallel=parallel))
    problems = [
        f"--{key.removeprefix('trainer.parallel.').replace('_', '-')}: {message}"
        for key, message in model_violations(recipe, config, "sft")
        if not key.endswith("pipeline")
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _stored_dtype(entry: Entry, reader: CheckpointReader, dtype: str | None) -> torch.dtype:
    """Of an entry's tensor: what its rule fixes, else `dtype`, else what holds all that it is made of."""
    wanted = [
        tensor.dtype if dtype is not None and tensor.dtype else dtype or reader.specs[tensor.name].dtype
        for tensor in entry.hf
    ]
    stored = getattr(torch, wanted[0])
    for name in wanted[1:]:
        stored = torch.promote_types(stored, getattr(torch, name))
    return stored


def _largest_shard(schema: ShardSchema, dtypes: Sequence[torch.dtype], reader: CheckpointReader) -> int:
    """Bytes of the largest one in the dtype in which it is read or stored, whichever is larger."""
    widths = [
        max(dtype.itemsize, *(element_bytes(reader.specs[tensor.name].dtype) for tensor in entry.hf))
        for entry, dtype in zip(schema.weight_map.entries, dtypes, strict=True)
    ]
    shards: dict[tuple[int, int], int] = {}
    for piece in schema.pieces:
        place = piece.entry, piece.shard
        shards[place] = shards.get(place, 0) + piece.numel * widths[piece.entry]
    return max(shards.values())


def _check_result(partial: Path, config: dict[str, Any], schema: ShardSchema, dtypes: Sequence[torch.dtype]) -> None:
    """Open what was written as any reader does: files, metadata and keys must make up the model.

    Raises:
        OSError: they do not.
    """
    expected = {
        tensor.name: TensorSpec(name=tensor.name, shape=tensor.shape, dtype=str(dtype).removeprefix("torch."))
        for entry, dtype in zip(schema.weight_map.entries, dtypes, strict=True)
        for tensor in entry.hf
    }
    try:
        with TorchDistCheckpoint(partial, config) as written:
            specs = written.specs
    except ValueError as error:
        raise OSError(f"{partial}: what was written does not read back: {error}") from error
    if specs != expected:
        wrong = min(name for name in specs.keys() | expected.keys() if specs.get(name) != expected.get(name))
        raise OSError(f"{partial}: {wrong} reads back as {specs.get(wrong)}, {expected.get(wrong)} was written")


def _write_facts(src: Path, partial: Path, config: dict[str, Any], parallel: ParallelConfig, dtype: str | None) -> None:
    world_size = smallest_world(parallel)
    layout = {
        **asdict(parallel),
        "virtual_pipeline": parallel.virtual_pipeline or 1,
        "world_size": world_size,
        "data": world_size // (parallel.tensor * parallel.pipeline * parallel.context),
        "sequence": int(parallel.sequence),
    }
    facts = {"architecture": architecture_of(config), "layout": layout}
    (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    hf = partial / HF_SUBFOLDER
    hf.mkdir(exist_ok=True)
    copy_other_files(src, hf)
    (hf / "config.json").write_text(json.dumps(plain_config(config, dtype), indent=2) + "\n")
