"""What is said of an option that no command has, since it is a setting, or since another program has it."""

from difflib import get_close_matches
from itertools import takewhile
from typing import Any

from typer.core import TyperCommand


class CommandWithHints(TyperCommand):
    """A command that says which setting was meant by an option such as slime's `--rollout-batch-size 32`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = ["--help", *(name for param in self.params for name in (*param.opts, *param.secondary_opts))]
        given = [*takewhile(lambda arg: arg != "--", args)]
        for place, (option, _, value) in enumerate(arg.partition("=") for arg in given):
            if option.startswith("--") and option not in own and not get_close_matches(option, own, cutoff=0.8):
                following = next((arg for arg in given[place + 1 : place + 2] if not arg.startswith("-")), "")
                if hint := _hint(option.lstrip("-").replace("-", "_"), value or following):
                    ctx.fail(f"No such option: {option}. {hint} Settings stand behind the recipe, as KEY=VALUE.")
        return super().parse_args(ctx, args)


def _hint(key: str, value: str) -> str:
    # The settings take a tenth of a second to import, which other uses need not wait for.
    from slimrl.config.hints import unknown_text
    from slimrl.config.keys import is_known, is_section

    if is_known(key) and not is_section(key):
        return f"It is a setting: {key}={value or 'VALUE'}."
    return unknown_text(key, value).strip()
