"""Options that mean the same in every command that has them."""

from pathlib import Path
from typing import Annotated

import typer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""By the names that recipes use for them, as torch prints them."""

KEEP = "keep"
"""Of --dtype: that which each tensor has."""

Out = Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be written, write nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not read the result back and compare it.")]
ShardGb = Annotated[float, typer.Option(min=0.000001, help="Gigabytes (1e9 bytes) per file at most.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Dtype = Annotated[str, typer.Option(help=f"{KEEP}, {', '.join(DTYPES)}. What a model keeps in float32 stays so.")]


def torch_dtype(option: str, value: str, choices: tuple[str, ...] = tuple(DTYPES)) -> str:
    """A dtype of the command line as torch prints it.

    Raises:
        ValueError: it is not among the choices.
    """
    if value not in choices:
        raise ValueError(f"{option} {value}: one of {', '.join(choices)}")
    return DTYPES[value]


def torch_dtype_or_keep(option: str, value: str) -> str | None:
    """The same where KEEP is a choice too; None for that."""
    return None if value == KEEP else torch_dtype(option, value, (KEEP, *DTYPES))
