"""Options that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import typer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Name in recipes and options -> torch's name."""

KEEP = "keep"
"""Value of --dtype: each tensor keeps its dtype."""

Out = Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not read the result back to compare it.")]
ShardGb = Annotated[float, typer.Option(min=0.000001, help="Gigabytes (1e9 bytes) per file at most.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Dtype = Annotated[str, typer.Option(help=f"{KEEP}, {', '.join(DTYPES)}. Tensors that models keep in float32 stay so.")]


def count(meaning: str) -> Any:
    """An option of a number of at least 1."""
    return typer.Option(min=1, help=meaning)


def check_sources(*folders: Path) -> None:
    """Raises ValueError if one is no folder; before the seconds that large imports take."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: {'a file' if folder.exists() else 'no such folder'}; a checkpoint is a folder")


def torch_dtype(option: str, value: str, choices: tuple[str, ...] = tuple(DTYPES)) -> str:
    """torch's name of a dtype option.

    Raises:
        ValueError: not one of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{option} {value}: one of {', '.join(choices)}")
    return DTYPES[value]


def torch_dtype_or_keep(value: str) -> str | None:
    """The same for --dtype, which may be KEEP; None for that."""
    return None if value == KEEP else torch_dtype("--dtype", value, (KEEP, *DTYPES))
