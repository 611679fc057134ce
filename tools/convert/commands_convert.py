"""`slimrl-tools convert`: between Hugging Face's format and Megatron's torch_dist, and from GGUF."""

from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import (
    KEEP,
    DryRun,
    Dtype,
    NoCheck,
    Out,
    Resume,
    ShardGb,
    check_sources,
    count,
    torch_dtype_or_keep,
)
from slimrl_tools.convert.options import Options
from slimrl_tools.convert.output_folder import check_new
from slimrl_tools.convert.usage import Direction, Directions
from slimrl_tools.exit_codes import exit_codes

from slimrl.base.imports import imports_uncollected
from slimrl.observability.logs import quiet_megatron

app = typer.Typer(
    cls=Directions,
    no_args_is_help=True,
    help="Convert checkpoints between Hugging Face's format and Megatron's torch_dist, and GGUF to the former.",
)

Processes = Annotated[int, typer.Option(min=1, help="Processes, each of which converts a part of the files.")]


@app.command(cls=Direction)
def hf_to_megatron(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Hugging Face checkpoint, block FP8 or not.")],
    out: Out,
    tensor: Annotated[int, count("Tensor-parallel ranks: shards of a tensor.")] = 1,
    pipeline: Annotated[int, count("Pipeline stages.")] = 1,
    virtual_pipeline: Annotated[int | None, count("Virtual stages of a pipeline stage.")] = None,
    expert: Annotated[int, count("Expert-parallel ranks.")] = 1,
    expert_tensor: Annotated[int, count("Tensor-parallel ranks of an expert: shards of its tensors.")] = 1,
    dtype: Dtype = KEEP,
    shard_gb: ShardGb = 1.0,
    processes: Processes = 1,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write a torch_dist checkpoint, which loads under any layout, with the model's config and tokenizer in OUT/hf.

    It loads fastest under the layout given here: --tensor and --expert-tensor set the number of shards of each tensor.
    The other sizes are only checked against the model and recorded, since layers and experts are stored one by one.

    A process holds at most 3 times the largest shard, however large the model is (gate and up of an MLP count as one
    tensor, so do query, key and value), in the source's dtype or the stored one, whichever is larger. An interrupted
    run leaves .OUT.partial; --resume continues it. Everything is read back and compared with checksums.

    \b
    Examples:
      slimrl-tools convert hf-to-megatron Qwen3-30B-A3B Qwen3-30B-A3B-mcore --tensor 4 --expert 8 --processes 8
      slimrl-tools convert hf-to-megatron DeepSeek-V3 DeepSeek-V3-mcore --tensor 8 --expert 64 --dry-run
    """
    with exit_codes():
        options = _options(dtype, processes, resume, no_check)
        check_new(out)
        check_sources(src)
        quiet_megatron()
        with imports_uncollected():
            from slimrl_tools.convert.hf_to_megatron import hf_to_megatron as convert

            from slimrl.config.schema.trainer import ParallelConfig

        parallel = ParallelConfig(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual_pipeline,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence=tensor > 1,
        )
        file_bytes = int(shard_gb * 1e9)
        convert(src, out, parallel, options, file_bytes=file_bytes, dry_run=dry_run, say=typer.echo)
        if not dry_run:
            typer.echo(str(out))


@app.command(cls=Direction)
def megatron_to_hf(
    src: Annotated[
        Path, typer.Argument(metavar="SRC", help="A converted checkpoint, a run's, or another torch_dist folder.")
    ],
    out: Out,
    shard_gb: ShardGb = 5.0,
    hf: Annotated[
        Path | None, typer.Option(help="Folder with config.json and tokenizer, instead of the copy in the checkpoint.")
    ] = None,
    dtype: Dtype = KEEP,
    processes: Processes = 1,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write safetensors with an index, config and tokenizer, without the optimizer state.

    A process holds at most 3 times the largest Megatron tensor, however large the model is, in the stored dtype or the
    written one, whichever is larger. Layers for multi-token prediction, which training leaves out, are copied from the
    folder of --hf if it has their weights.

    \b
    Examples:
      slimrl-tools convert megatron-to-hf Qwen3-30B-A3B-mcore Qwen3-30B-A3B-back
      slimrl-tools convert megatron-to-hf runs/my_run/checkpoints/step_000100 my_model --dtype bf16 --shard-gb 4
    """
    with exit_codes():
        options = _options(dtype, processes, resume, no_check)
        check_new(out)
        check_sources(src)
        quiet_megatron()
        with imports_uncollected():
            from slimrl_tools.convert.megatron_to_hf import megatron_to_hf as convert

        shard_bytes = int(shard_gb * 1e9)
        convert(src, out, options, shard_bytes=shard_bytes, hf_dir=hf, dry_run=dry_run, say=typer.echo)
        if not dry_run:
            typer.echo(str(out))


@app.command(cls=Direction)
def gguf_to_hf(
    src: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file with a whole model.")],
    out: Out,
    dtype: Dtype = KEEP,
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write the model of a GGUF file, dequantised, with config, tokenizer, chat template and generation config.

    The weights are those of the quantised file, not those that it was made from; OUT/README.md says so too. With
    --dtype keep quantised tensors become float32. Values are those of transformers, and so are the architectures that
    are read; what transformers would read in part is refused. One parameter is held at a time.

    \b
    Examples:
      slimrl-tools convert gguf-to-hf SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct
      slimrl-tools convert gguf-to-hf qwen3-8b-q8_0.gguf Qwen3-8B --dtype bf16
    """
    with exit_codes():
        torch_name = torch_dtype_or_keep(dtype)
        check_new(out)
        with imports_uncollected():
            from slimrl_tools.convert.gguf_to_hf import gguf_to_hf as convert
            from slimrl_tools.derive.rewrite import write_checkpoint

        rewrite = convert(src, torch_name, say=typer.echo)
        shard_bytes = int(shard_gb * 1e9)
        write_checkpoint(
            rewrite, out, shard_bytes=shard_bytes, dry_run=dry_run, resume=resume, check=not no_check, say=typer.echo
        )


def _options(dtype: str, processes: int, resume: bool, no_check: bool) -> Options:
    return Options(dtype=torch_dtype_or_keep(dtype), processes=processes, resume=resume, check=not no_check)
