"""What to write instead of uses that `slimrl-tools convert` does not have."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from slimrl.config.aliases import alias_of

_PARALLEL = "trainer.parallel."


class Directions(TyperGroup):
    """Says which direction is meant where none is written: `slimrl-tools convert A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = any(get_close_matches(arg, list(self.commands)) for arg in args)
        if args and "--help" not in args and not named:
            folders = [arg for arg in args if Path(arg).is_dir()]
            kinds = {"hf-to-megatron": "a folder of Hugging Face's format", "megatron-to-hf": "a torch_dist checkpoint"}
            if any(Path(arg).suffix == ".gguf" for arg in args):
                kinds = {"gguf-to-hf": "a GGUF file"}
            elif folders and (Path(folders[0]) / ".metadata").is_file():
                del kinds["hf-to-megatron"]
            elif folders and (Path(folders[0]) / "config.json").is_file():
                del kinds["megatron-to-hf"]
            meant = " or ".join(f"{ctx.command_path} {name} SRC OUT ({kind})" for name, kind in kinds.items())
            ctx.fail(f"the direction is missing. Write {meant}")
        return super().parse_args(ctx, args)


class Direction(TyperCommand):
    """Names the option that is meant by another program's name of a parallel size."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in param.opts}
        for name in (arg.partition("=")[0] for arg in args):
            meant = alias_of(name[2:]) if name.startswith("--") and name not in own else None
            if meant and meant.startswith(_PARALLEL) and meant.removeprefix(_PARALLEL).isidentifier():
                option = f"--{meant.removeprefix(_PARALLEL).replace('_', '-')}"
                known = (
                    f"Did you mean {option}?" if option in own else "Leave it out: it changes nothing that is written."
                )
                ctx.fail(f"No such option: {name}. {known}")
        return super().parse_args(ctx, args)
