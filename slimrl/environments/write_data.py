"""Makes the data of an environment, in its virtual environment. Needs the standard library alone."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OWN = ("out", "num", "heldout", "seed")


def write(module: str, out: str, num: int, heldout: int, seed: int, options: Mapping[str, Any]) -> None:
    """Write the prompt files of an environment and what they name.

    Args:
        module: with the function `write` of the environment.
        out: folder of the files, which is made.
        num: tasks to train on.
        heldout: tasks to evaluate on.
        options: further arguments of the function, such as difficulties.

    Raises:
        ValueError: the environment has no such option, or refuses a value.
    """
    function = importlib.import_module(module).write
    known = [name for name in inspect.signature(function).parameters if name not in _OWN]
    if unknown := set(options) - set(known):
        said = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(f"no option {', '.join(sorted(unknown))} of this environment; {said}")
    for name, value in options.items():
        kind = inspect.signature(function).parameters[name].annotation
        if kind is int and not isinstance(value, int):
            raise ValueError(f"{name}={value}: not a whole number")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be made: {error}") from error
    function(Path(out), num=num, heldout=heldout, seed=seed, **options)
