"""`slimrl-tools prepare`."""

from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.exit_codes import exit_codes

NUM, HELDOUT = 1000, 100


def prepare(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="gsm8k, dapo-math, math, aime, deepscaler or reasoning-gym.")
    ],
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|TASKS",
            help="The file as downloaded: Parquet, JSONL, JSON or CSV; also .jsonl.gz and .json.gz. "
            "Of reasoning-gym its tasks, with commas between them.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="New prompt file (JSONL). Of reasoning-gym a folder of tasks.")
    ],
    difficulty: Annotated[
        str | None,
        typer.Option(
            help="Of reasoning-gym: levels of its curricula (0 is the easiest), settings of its tasks "
            "(max_terms=3, or chain_sum.max_terms=3), with commas between them. Default: as the tasks have it."
        ),
    ] = None,
    num: Annotated[int | None, typer.Option(min=1, help=f"Of reasoning-gym: questions to train on. [{NUM}]")] = None,
    heldout: Annotated[
        int | None, typer.Option(min=1, help=f"Of reasoning-gym: questions to evaluate on. [{HELDOUT}]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of reasoning-gym: the same seed gives the same files. [0]")] = None,
) -> None:
    """Write a prompt file from a downloaded data set of problems with final answers, or files of generated tasks.

    A problem that comes several times is written once; one that comes with different answers is left out. The prompts
    are the bare problems: ask for the answer in \\boxed{} with agent.system_prompt.

    Of tasks of reasoning-gym each gets OUT/TASK/train.jsonl and heldout.jsonl, of several levels train_0.jsonl and so
    on. No question is in two of a task's files.

    \b
    Examples:
      slimrl-tools prepare gsm8k gsm8k/main/train-00000-of-00001.parquet data/gsm8k.jsonl
      slimrl-tools prepare dapo-math dapo-math-17k.parquet data/dapo-math-17k.jsonl
      slimrl-tools prepare reasoning-gym chain_sum,gcd data/tasks --difficulty 0 --num 2000
    """
    with exit_codes():
        options = {"--difficulty": difficulty, "--num": num, "--heldout": heldout, "--seed": seed}
        if name == "reasoning-gym":
            from slimrl_tools.prepare.reasoning_gym import prepare_tasks, recipe_lines

            written = prepare_tasks(
                source, out, difficulty=difficulty or "", num=num or NUM, heldout=heldout or HELDOUT, seed=seed or 0
            )
            for files in written:
                typer.echo(str(files))
            typer.echo(f"\nFor a recipe:\n\n{recipe_lines(written)}", nl=False)
            return
        if given := [option for option, value in options.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: only for reasoning-gym, and not for {name}")
        from slimrl_tools.prepare.prepare import prepare as write_prompts

        done = write_prompts(name, Path(source), out)
        typer.echo(
            f"{out}: {done.written} problems of {done.rows} rows; left out: {done.repeated} repeated, "
            f"{done.contradicting} of problems with different answers"
        )
