"""`slimrl-tools average`, `slice-layers`, `quantize` and `dequantize`: checkpoints derived from others."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from slimrl_tools.command_options import (
    DTYPES,
    KEEP,
    DryRun,
    Dtype,
    NoCheck,
    Out,
    Resume,
    ShardGb,
    check_sources,
    torch_dtype,
    torch_dtype_or_keep,
)
from slimrl_tools.convert.output_folder import check_new
from slimrl_tools.exit_codes import exit_codes

if TYPE_CHECKING:
    from slimrl_tools.derive.rewrite import Rewrite

    from slimrl.checkpoints.checkpoint_reader import CheckpointReader

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Hugging Face checkpoint.")]


def average(
    paths: Annotated[
        list[Path], typer.Argument(metavar="A B [C ...] OUT", help="Two or more checkpoints, then the new folder.")
    ],
    weights: Annotated[
        str | None, typer.Option(help="A number per checkpoint, separated by commas, adding up to 1. Default: equal.")
    ] = None,
    dtype: Dtype = KEEP,
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write the mean of Hugging Face checkpoints of one model, such as those of several seeds.

    Sums are taken in float32, tensor by tensor. Config and tokenizer are the first checkpoint's. The mean of
    checkpoints in block FP8 is written unquantised. A tensor that is not in the dtype of config.json keeps its own.

    \b
    Examples:
      slimrl-tools average seed0/export/hf seed1/export/hf seed2/export/hf mean
      slimrl-tools average tuned base mix --weights 0.7,0.3 --dtype fp32
    """
    with exit_codes(), ExitStack() as stack:
        *sources, out = paths
        torch_name, shares = torch_dtype_or_keep(dtype), _numbers(weights)
        check_new(out)
        check_sources(*sources)
        from slimrl_tools.derive.average import averaging

        from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint

        readers = [stack.enter_context(open_hf_checkpoint(path)) for path in sources]
        _say_left_out(*readers)
        _write(averaging(readers, shares, torch_name), out, shard_gb, dry_run, resume, no_check)


def slice_layers(
    src: Source,
    out: Out,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers to keep, from the first.")],
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write the first layers of a checkpoint as a model of its own, for a smoke test of a big model on few GPUs.

    Embedding, final norm, head and tokenizer stay; config.json is adapted; block FP8 stays as it is. Layers for
    multi-token prediction are left out. The model's output is noise, but its layers are as wide as the original's.

    \b
    Examples:
      slimrl-tools slice-layers Qwen3-235B-A22B Qwen3-235B-A22B-4-layers --layers 4
      slimrl-tools slice-layers DeepSeek-V3 DeepSeek-V3-5-layers --layers 5 --dry-run
    """
    with exit_codes():
        check_new(out)
        check_sources(src)
        from slimrl_tools.derive.slice_layers import slicing

        from slimrl.checkpoints.hf_checkpoint import open_stored

        with open_stored(src) as folder:
            _say_left_out(folder)
            _write(slicing(folder, layers), out, shard_gb, dry_run, resume, no_check)


def quantize(
    src: Source,
    out: Out,
    to_format: Annotated[str, typer.Option("--format", help="fp8-block is the only format.")] = "fp8-block",
    block: Annotated[int, typer.Option(min=1, help="Rows and columns of a tile.")] = 128,
    not_convert: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A module to leave as it is; may be given several times.")
    ] = None,
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write a checkpoint in block FP8 as DeepSeek and SGLang use it: float8_e4m3fn with a float32 scale per tile.

    Linear layers and experts are quantised. Embeddings, output layer, norms and routers are not, nor the modules of
    --not-convert: a whole module name or a part of one between dots. The result is compared with the source at the end.

    \b
    Examples:
      slimrl-tools quantize Qwen3-30B-A3B Qwen3-30B-A3B-FP8
      slimrl-tools quantize model model-fp8 --not-convert self_attn --not-convert model.layers.0
      slimrl-tools quantize model model-fp8 --resume
    """
    with exit_codes():
        if to_format != "fp8-block":
            raise ValueError(f"--format {to_format}: fp8-block is the only format")
        check_new(out)
        check_sources(src)
        from slimrl_tools.derive.quantize import quantization

        from slimrl.checkpoints.hf_checkpoint import open_stored

        with open_stored(src) as folder:
            _say_left_out(folder)
            rewrite = quantization(folder, (block, block), not_convert or [])
            _write(rewrite, out, shard_gb, dry_run, resume, no_check)


def dequantize(
    src: Source,
    out: Out,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bf16",
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write a checkpoint in block FP8 or packed INT4, of any model, or of gpt-oss in MXFP4, as a plain one.

    \b
    Examples:
      slimrl-tools dequantize DeepSeek-V3 DeepSeek-V3-bf16
      slimrl-tools dequantize gpt-oss-20b gpt-oss-20b-bf16
      slimrl-tools dequantize Kimi-K2.5 Kimi-K2.5-bf16
      slimrl-tools dequantize model-fp8 model --dtype fp32
    """
    with exit_codes():
        torch_name = torch_dtype("--dtype", dtype)
        check_new(out)
        check_sources(src)
        from slimrl_tools.derive.quantize import dequantization

        from slimrl.checkpoints.hf_checkpoint import open_stored

        with open_stored(src) as folder:
            _say_left_out(folder)
            _write(dequantization(folder, torch_name), out, shard_gb, dry_run, resume, no_check)


def _say_left_out(*readers: "CheckpointReader") -> None:
    from slimrl.checkpoints.hf_checkpoint import left_out_note

    for reader in readers:
        if note := left_out_note(reader):
            typer.echo(note)


def _write(rewrite: "Rewrite", out: Path, shard_gb: float, dry_run: bool, resume: bool, no_check: bool) -> None:
    from slimrl_tools.derive.rewrite import write_checkpoint

    shard_bytes = int(shard_gb * 1e9)
    write_checkpoint(
        rewrite, out, shard_bytes=shard_bytes, dry_run=dry_run, resume=resume, check=not no_check, say=typer.echo
    )


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--weights {text}: numbers separated by commas, such as 0.7,0.3") from None
