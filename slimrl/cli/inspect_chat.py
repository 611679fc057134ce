"""`slimrl inspect-chat`."""

import asyncio

import typer

from slimrl.cli.arguments import ForCommand, Overrides, Recipe, ToJson


def inspect_chat(
    recipe: Recipe, overrides: Overrides = None, command: ForCommand = None, to_json: ToJson = False
) -> None:
    """Print one conversation of a recipe token by token: who wrote it, what is trained on, where turns end.

    Of `slimrl train` a made-up episode, in which the policy calls the first tool and then answers; of `slimrl sft` the
    first conversation of data.train, which must be there. Needs the tokenizer of model.path, but not its weights.
    """
    from slimrl.config.load import intended_command, load_recipe
    from slimrl.observability.chat_preview import as_json, print_preview
    from slimrl.observability.terminal import plain_console
    from slimrl.runtime.checks.preview import preview

    loaded = load_recipe(recipe, overrides or [], command or intended_command(recipe, overrides or []))
    shown = asyncio.run(preview(loaded))
    if to_json:
        typer.echo(as_json(shown))
    else:
        print_preview(shown, plain_console())
