"""`slimrl-tools verify`: compares two checkpoints."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from slimrl_tools.command_options import Json, check_sources, torch_dtype
from slimrl_tools.exit_codes import exit_codes
from slimrl_tools.terminal import make_console, make_table

from slimrl.observability.logs import quiet_megatron

if TYPE_CHECKING:
    from slimrl_tools.verify.compare import Comparison
    from slimrl_tools.verify.logits import LogitComparison
    from slimrl_tools.verify.verification import Verification

MAX_SHOWN = 20
"""Differences of each kind that are printed; --json prints all."""


def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint in any format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The checkpoint to compare with it.")],
    logits: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compare logits on this many random prompts too.")
    ] = 0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="With --logits: tokens of a prompt.")] = 64,
    logits_dtype: Annotated[str, typer.Option(help="With --logits: precision of both models, fp32 or bf16.")] = "fp32",
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest absolute difference that counts as equal.")
    ] = None,
    ignore_dtype: Annotated[bool, typer.Option("--ignore-dtype", help="Do not count dtypes as differences.")] = False,
    hf: Annotated[
        Path | None, typer.Option(help="Folder with config.json, for torch_dist checkpoints without one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints in any two formats, tensor by tensor. Exit code 0: the same, 1: different, 2: refused.

    Formats: Hugging Face folders, plain or in block FP8; torch_dist folders; a run's checkpoints. Names, shapes, dtypes
    and every element are compared, one tensor of each at a time. Tensors of the same dtype must be equal bit for bit.
    Tensors of different dtypes may differ by the rounding of the coarser one; the dtypes count as a difference unless
    --ignore-dtype is given. With block FP8 on one side, elements may differ by its quantisation error. --tolerance
    replaces these limits.

    With --logits each model is loaded whole: Hugging Face formats into transformers, torch_dist into Megatron.

    \b
    Examples:
      slimrl-tools verify Qwen3-30B-A3B Qwen3-30B-A3B-mcore
      slimrl-tools verify model model-fp8 --logits 4
      slimrl-tools verify runs/a/export/hf runs/a/checkpoints/step_000012 --ignore-dtype --json > differences.json
    """
    with exit_codes():
        dtype = torch_dtype("--logits-dtype", logits_dtype, ("fp32", "bf16"))
        check_sources(a, b)
        quiet_megatron()
        from slimrl_tools.verify.verification import LogitRequest
        from slimrl_tools.verify.verification import verify as run

        request = LogitRequest(num_prompts=logits, num_tokens=prompt_tokens, dtype=dtype) if logits else None
        result = run(a, b, hf_dir=hf, tolerance=tolerance, ignore_dtype=ignore_dtype, logits=request)
        if as_json:
            typer.echo(json.dumps(result.as_dict(), indent=2))
        else:
            _show(result)
    if not result.same:
        raise typer.Exit(1)


def _show(result: "Verification") -> None:
    console = make_console()
    for side, checkpoint in (("A", result.a), ("B", result.b)):
        console.print(f"{side}  {checkpoint.path} ({checkpoint.format})")
    for line in result.left_out:
        console.print(line)
    found = result.tensors
    for title, lines in {
        "configs differ": result.config,
        "missing in B": found.missing,
        "only in B": found.extra,
        "of another shape": [f"{name}: {list(a)} in A, {list(b)} in B" for name, a, b in found.shapes],
    }.items():
        if lines:
            console.print(f"{len(lines)} {title}:")
            for line in lines[:MAX_SHOWN]:
                console.print(f"  {line}")
            if len(lines) > MAX_SHOWN:
                console.print(f"  and {len(lines) - MAX_SHOWN} more")
    if found.dtypes:
        name, a, b = found.dtypes[0]
        console.print(f"{len(found.dtypes)} of another dtype, such as {name}: {a} in A, {b} in B")
    if found.differences:
        _print_differences(console, found)
    equal = found.num_tensors - len(found.differences)
    kept = len(found.differences) - found.num_exceeding
    console.print(
        f"{found.num_tensors} tensors compared: {equal} equal bit for bit, {kept} within their limit, "
        f"{found.num_exceeding} beyond it"
    )
    if result.logits is not None:
        console.print(_logit_line(result.logits))
    console.print("the same" if result.same else f"DIFFERENT: {', '.join(result.reasons)}")


def _print_differences(console: Console, found: "Comparison") -> None:
    table = make_table("tensor", "max |a-b|", "relative", "at", "limit", "", right=("max |a-b|", "relative"))
    for difference in found.differences[:MAX_SHOWN]:
        table.add_row(
            difference.name,
            f"{difference.max_abs:.2e}",
            f"{difference.max_relative:.2e}",
            str(list(difference.where)),
            difference.limit.reason,
            "" if difference.within else "beyond",
        )
    if len(found.differences) > MAX_SHOWN:
        table.add_row(f"and {len(found.differences) - MAX_SHOWN} more")
    console.print(table)


def _logit_line(logits: "LogitComparison") -> str:
    measure = "max" if logits.precision == "float32" else "rms"
    return (
        f"logits of {logits.num_tokens} tokens: max |a-b| {logits.max_abs:.2e} (largest logit {logits.largest:.1f}), "
        f"relative rms {logits.relative_rms:.2e}, {'within' if logits.within else 'BEYOND'} the limit of {measure} "
        f"{logits.limit:.2e} for {logits.precision}; greedy tokens agree at {logits.greedy_agreement:.1%}"
    )
