"""`slimrl-tools average` and `slice-layers`: checkpoints made of others."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import KEEP, DryRun, Dtype, NoCheck, Out, Resume, ShardGb, torch_dtype_or_keep
from slimrl_tools.exit_codes import exit_codes


def average(
    paths: Annotated[
        list[Path], typer.Argument(metavar="A B [C ...] OUT", help="Two or more checkpoints, then the new folder.")
    ],
    weights: Annotated[
        str | None, typer.Option(help="One number per checkpoint, by commas, adding up to 1. Equal without it.")
    ] = None,
    dtype: Dtype = KEEP,
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write the mean of Hugging Face checkpoints of one model, such as those of several seeds.

    Sums are taken in float32, tensor by tensor. Config and tokenizer are the first checkpoint's. Block FP8 is read, and
    the mean written unquantised. A tensor that is not in the dtype of config.json keeps its own.

    \b
    Examples:
      slimrl-tools average seed0/export/hf seed1/export/hf seed2/export/hf mean
      slimrl-tools average tuned base mix --weights 0.7,0.3 --dtype fp32
    """
    with exit_codes(), ExitStack() as stack:
        from slimrl_tools.average import averaging
        from slimrl_tools.rewrite import run_rewrite

        from slimrl.models.hf_checkpoint import open_hf_checkpoint

        *sources, out = paths
        torch_name = torch_dtype_or_keep("--dtype", dtype)
        readers = [stack.enter_context(open_hf_checkpoint(path)) for path in sources]
        rewrite = averaging(readers, _numbers(weights), torch_name, int(shard_gb * 1e9))
        run_rewrite(rewrite, out, dry_run=dry_run, resume=resume, check=not no_check, say=typer.echo)


def slice_layers(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Hugging Face checkpoint.")],
    out: Out,
    layers: Annotated[int, typer.Option(min=1, help="How many layers to keep, from the first.")],
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write the first layers of a checkpoint as a model of its own, for a smoke test of a big model on few GPUs.

    Embedding, last norm, head and tokenizer stay; config.json is cut to match; block FP8 stays as it is. Layers for
    multi-token prediction are left out. What the result says is noise, but its layers are as wide as the original's.

    \b
    Examples:
      slimrl-tools slice-layers Qwen3-235B-A22B Qwen3-235B-A22B-4-layers --layers 4
      slimrl-tools slice-layers DeepSeek-V3 DeepSeek-V3-5-layers --layers 5 --dry-run
    """
    with exit_codes():
        from slimrl_tools.rewrite import run_rewrite
        from slimrl_tools.slice_layers import slicing

        from slimrl.models.safetensors_folder import SafetensorsFolder

        with SafetensorsFolder(src) as folder:
            rewrite = slicing(folder, layers, int(shard_gb * 1e9))
            run_rewrite(rewrite, out, dry_run=dry_run, resume=resume, check=not no_check, say=typer.echo)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--weights {text}: numbers separated by commas, such as 0.7,0.3") from None
