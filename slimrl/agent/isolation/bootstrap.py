"""Program that another interpreter runs: calls a function of slimrl's, which need not be installed there.

The first line of its input is JSON: `slimrl`, the folder of that package, `path`, further folders to import from,
`light`, whether slimrl.api shall need no package, `call`, the import path of the function, and `arguments`.

The output is one line of JSON: `{"result": ...}` with what the function returned, or `null` there when it calls its
argument `ready`, which it gets if it has one; else `{"problem": ...}`, what went wrong. All else that is printed goes
to standard error.
"""

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(_first_line())
    answers = os.dup(1)
    os.dup2(2, 1)

    def answer(key: str, value: Any) -> None:
        os.write(answers, json.dumps({key: value}).encode() + b"\n")

    def ready() -> None:
        answer("result", None)

    _find_slimrl(Path(job["slimrl"]))
    # In place of this file's folder, whose modules have names that packages have too.
    sys.path[:1] = job["path"]
    module, _, name = job["call"].partition(":")
    try:
        if job["light"]:
            sys.modules["slimrl.api"] = importlib.import_module("slimrl.agent.isolation.light_api")
        function = getattr(importlib.import_module(module), name)
        waits = "ready" in inspect.signature(function).parameters
        result = function(**job["arguments"], **({"ready": ready} if waits else {}))
    except ValueError as error:
        answer("problem", str(error))
    except Exception as error:  # noqa: BLE001 - the function runs code of others, which may raise anything
        traceback.print_exc()
        lacks = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        hint = f"; install it with: {sys.executable} -m pip install {lacks}" if lacks == "websockets" else ""
        answer("problem", f"{error!r}{hint} (in {sys.prefix})")
    else:
        answer("result", result)


def _first_line() -> bytes:
    """Read byte by byte: what comes after the line is not this program's."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _find_slimrl(folder: Path) -> None:
    """Make the package of this folder the one that is imported."""
    spec = importlib.util.spec_from_file_location(
        "slimrl", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["slimrl"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
