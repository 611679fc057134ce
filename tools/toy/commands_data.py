"""`slimrl-tools calculator-data`, `python-data` and `proposer-data`: the files of toy tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from slimrl_tools.command_options import Seed, count
from slimrl_tools.exit_codes import exit_codes


@dataclass(frozen=True, kw_only=True)
class ToyTask:
    name: str
    """`write_NAME_data` of the module `NAME_data` writes its files"""
    help: str
    num_conversations: int = 12000


TASKS = (
    ToyTask(
        name="calculator",
        # Each is seen once or twice in the cold start of recipes/tiny_moe/sft.yaml.
        num_conversations=8000,
        help="Write the calculator task: problems to train and evaluate on, and conversations for the cold start.",
    ),
    ToyTask(
        name="python",
        help="Write the Python task: questions that a short program answers, and conversations for the cold start.",
    ),
    ToyTask(
        name="proposer",
        help="Write the proposer task: prompts to make up arithmetic, problems to evaluate on, and conversations.",
    ),
)


def add_data_commands(app: typer.Typer) -> None:
    for task in TASKS:
        app.command(f"{task.name}-data", help=task.help)(_command(task))


def _command(task: ToyTask) -> Callable[..., None]:
    def write_data(
        out: Annotated[Path, typer.Argument(help="New folder for train.jsonl, heldout.jsonl and sft.jsonl.")],
        seed: Seed = 0,
        num_train: Annotated[int, count("Questions to train on.")] = 4096,
        num_heldout: Annotated[int, count("Questions to evaluate on.")] = 512,
        num_conversations: Annotated[int, count("Conversations of the cold start.")] = task.num_conversations,
    ) -> None:
        with exit_codes():
            write = getattr(import_module(f"slimrl_tools.toy.{task.name}_data"), f"write_{task.name}_data")
            write(out, seed=seed, num_train=num_train, num_heldout=num_heldout, num_conversations=num_conversations)
            typer.echo(f"{out}: {num_train} + {num_heldout} questions, {num_conversations} conversations")

    return write_data
