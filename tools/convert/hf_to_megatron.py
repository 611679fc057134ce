"""Converts a Hugging Face checkpoint to a torch_dist checkpoint, which Megatron loads under any layout.

1. The source is checked against its config.json, and the layout against the model.
2. The schema of the layout lists the chunks to store; they are distributed over files.
3. Processes write the files from slices of the source, read them back and compare checksums.
4. Metadata, architecture, config and tokenizer are added, and the folder is renamed.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial as bind
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from slimrl_tools.convert.conversion import Plan, Say, read_record, write_in_parallel
from slimrl_tools.convert.options import Options
from slimrl_tools.convert.output_folder import output_folder, source_files
from slimrl_tools.convert.torch_dist_writer import distcp_writer
from slimrl_tools.torch_dist import TorchDistCheckpoint

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.hf_check import check_tensors
from slimrl.checkpoints.hf_checkpoint import left_out_note, open_hf_checkpoint
from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.checkpoints.torch_dist.chunks import ShardSchema
from slimrl.checkpoints.torch_dist.files import FILE_BYTES, chunk_bytes, plan_distcp_files
from slimrl.checkpoints.torch_dist.layer_schema import layer_schema
from slimrl.checkpoints.torch_dist.metadata import write_metadata
from slimrl.config.model_rules import model_violations
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import ParallelConfig, TrainerConfig
from slimrl.data.model_weights import TensorSpec
from slimrl.models.architecture import FACTS_FILE, HF_SUBFOLDER, architecture_of
from slimrl.models.family import family_of
from slimrl.models.hf_config import plain_config, read_hf_config, write_hf_config
from slimrl.models.weight_map import Entry


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
    """Convert, or only describe the output. Memory: see `write_distcp_file`.

    Args:
        file_bytes: tensor bytes per file at most; a larger shard gets a file of its own.

    Raises:
        ValueError: the source, the layout or the output folder is refused; nothing was written.
        OSError: the disk is full, or a file reads back differently.
    """
    config = read_hf_config(src)
    _check_layout(config, parallel)
    with open_hf_checkpoint(src) as reader:
        if note := left_out_note(reader):
            say(note)
        mtp = check_tensors(reader, family_of(config), config)
        schema = layer_schema(config, tensor=parallel.tensor, expert_tensor=parallel.expert_tensor, mtp=mtp)
        dtypes = [_stored_dtype(entry, reader, options.dtype) for entry in schema.weight_map.entries]
        largest = _largest_shard(schema, dtypes, reader)
    files = plan_distcp_files(schema, dtypes, file_bytes)
    plan = Plan(
        out=out,
        num_tensors=len({chunk.key for chunk in schema.chunks}),
        files={name: sum(chunk_bytes(chunk, dtypes) for chunk in chunks) for name, chunks in files.items()},
        largest_bytes=largest,
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
        write_in_parallel(
            bind(distcp_writer, src, schema.weight_map.entries, dtypes),
            files,
            plan.files,
            partial,
            title="convert",
            processes=options.processes,
            check=options.check,
        )
        spans = {name: read_record(partial, name) for name in files}
        written = {name: list(zip(chunks, spans[name], strict=True)) for name, chunks in files.items()}
        write_metadata(partial, schema, dtypes, written)
        _check_result(partial, config, schema, dtypes)
        _write_facts(src, partial, config, parallel, options.dtype)


def _check_layout(config: dict[str, Any], parallel: ParallelConfig) -> None:
    """Raises ValueError unless the layout fits the model.

    Layers need not divide over pipeline stages: stages may be uneven, and the files are the same.
    """
    # 0 ranks, since every size divides 0: no number of ranks is given.
    recipe = Recipe(trainer=TrainerConfig(num_ranks=0, parallel=parallel))
    problems = [
        f"--{key.removeprefix('trainer.parallel.').replace('_', '-')}: {message}"
        for key, message in model_violations(recipe, config, "sft")
        if not key.endswith("pipeline")
    ]
    if problems:
        raise ValueError("\n".join(problems))


def _stored_dtype(entry: Entry, reader: CheckpointReader, dtype: str | None) -> torch.dtype:
    """The stored dtype of an entry: the one its rule fixes, else `dtype`, else the promotion of its source dtypes."""
    wanted = [
        tensor.dtype if dtype is not None and tensor.dtype else dtype or reader.specs[tensor.name].dtype
        for tensor in entry.hf
    ]
    return reduce(torch.promote_types, (getattr(torch, name) for name in wanted))


def _largest_shard(schema: ShardSchema, dtypes: Sequence[torch.dtype], reader: CheckpointReader) -> int:
    """Bytes of the largest shard in its source or stored dtype, whichever is larger."""
    widths = [
        max(dtype.itemsize, *(element_bytes(reader.specs[tensor.name].dtype) for tensor in entry.hf))
        for entry, dtype in zip(schema.weight_map.entries, dtypes, strict=True)
    ]
    shards: Counter[tuple[int, int]] = Counter()
    for chunk in schema.chunks:
        shards[chunk.entry, chunk.shard] += chunk.numel * widths[chunk.entry]
    return max(shards.values())


def _check_result(partial: Path, config: dict[str, Any], schema: ShardSchema, dtypes: Sequence[torch.dtype]) -> None:
    """Open the output as any reader does.

    Raises:
        OSError: files, metadata and keys do not make up the model.
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
    world_size = parallel.smallest_world()
    layout = {
        **asdict(parallel),
        "virtual_pipeline": parallel.virtual_pipeline or 1,
        "world_size": world_size,
        "data": parallel.data(world_size),
        "sequence": int(parallel.sequence),
    }
    facts = {"architecture": architecture_of(config), "layout": layout}
    (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    hf = partial / HF_SUBFOLDER
    hf.mkdir(exist_ok=True)
    copy_other_files(src, hf)
    write_hf_config(hf, plain_config(config, dtype))
