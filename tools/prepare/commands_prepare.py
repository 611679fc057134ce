"""`slimrl-tools prepare`."""

from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.exit_codes import exit_codes


def prepare(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gsm8k, dapo-math, math, aime or deepscaler.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file as downloaded: Parquet, JSONL, JSON or CSV; also .jsonl.gz and .json.gz."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New prompt file (JSONL).")],
) -> None:
    """Write a prompt file from a downloaded data set of problems with final answers.

    A problem that comes several times is written once; one that comes with different answers is left out. The prompts
    are the bare problems: ask for the answer in \\boxed{} with agent.system_prompt.

    \b
    Examples:
      slimrl-tools prepare gsm8k gsm8k/main/train-00000-of-00001.parquet data/gsm8k.jsonl
      slimrl-tools prepare dapo-math dapo-math-17k.parquet data/dapo-math-17k.jsonl
    """
    with exit_codes():
        from slimrl_tools.prepare.prepare import prepare as write_prompts

        done = write_prompts(name, file, out)
        typer.echo(
            f"{out}: {done.written} problems of {done.rows} rows; left out: {done.repeated} repeated, "
            f"{done.contradicting} of problems with different answers"
        )
