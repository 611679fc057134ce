"""`slimrl-tools quantize` and `dequantize`: checkpoints to block FP8 and back."""

from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import DTYPES, DryRun, NoCheck, Out, Resume, ShardGb, torch_dtype
from slimrl_tools.exit_codes import exit_codes

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Hugging Face checkpoint.")]


def quantize(
    src: Source,
    out: Out,
    to_format: Annotated[str, typer.Option("--format", help="fp8-block is the one there is.")] = "fp8-block",
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

    Linear layers and experts are quantised; embeddings, output layer, norms and routers are not, nor what --not-convert
    names: a whole module name or a part of one between dots. The result is compared with the source at the end.

    \b
    Examples:
      slimrl-tools quantize Qwen3-30B-A3B Qwen3-30B-A3B-FP8
      slimrl-tools quantize model model-fp8 --not-convert self_attn --not-convert model.layers.0
      slimrl-tools quantize model model-fp8 --resume
    """
    with exit_codes():
        from slimrl_tools.quantize import quantization
        from slimrl_tools.rewrite import run_rewrite

        from slimrl.models.safetensors_folder import SafetensorsFolder

        if to_format != "fp8-block":
            raise ValueError(f"--format {to_format}: fp8-block is the one there is")
        with SafetensorsFolder(src) as folder:
            rewrite = quantization(folder, (block, block), not_convert or [], int(shard_gb * 1e9))
            run_rewrite(rewrite, out, dry_run=dry_run, resume=resume, check=not no_check, say=typer.echo)


def dequantize(
    src: Source,
    out: Out,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bf16",
    shard_gb: ShardGb = 5.0,
    dry_run: DryRun = False,
    resume: Resume = False,
    no_check: NoCheck = False,
) -> None:
    """Write a checkpoint in block FP8, of any model, as a plain one.

    \b
    Examples:
      slimrl-tools dequantize DeepSeek-V3 DeepSeek-V3-bf16
      slimrl-tools dequantize model-fp8 model --dtype fp32
    """
    with exit_codes():
        from slimrl_tools.quantize import dequantization
        from slimrl_tools.rewrite import run_rewrite

        from slimrl.models.safetensors_folder import SafetensorsFolder

        torch_name = torch_dtype("--dtype", dtype)
        with SafetensorsFolder(src) as folder:
            rewrite = dequantization(folder, torch_name, int(shard_gb * 1e9))
            run_rewrite(rewrite, out, dry_run=dry_run, resume=resume, check=not no_check, say=typer.echo)
