"""Program that another interpreter runs: calls a function of slimrl's, which need not be installed there.

Its one argument is JSON: `slimrl`, the folder of that package, `path`, further folders to import from, `call`, the
import path of the function, and `arguments`. Of slimrl the function may import what needs the standard library alone.

The output is one line of JSON: `null` when the function has returned, or calls its argument `ready`, which it gets if
it has one; the message of a ValueError, which is what the user got wrong. All else that is printed goes to standard
error.
"""

import importlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path


def main() -> None:
    job = json.loads(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)

    def answer(refusal: str | None = None) -> None:
        os.write(answers, json.dumps(refusal).encode() + b"\n")

    _find_slimrl(Path(job["slimrl"]))
    sys.path[:0] = job["path"]
    module, _, name = job["call"].partition(":")
    function = getattr(importlib.import_module(module), name)
    waits = "ready" in inspect.signature(function).parameters
    try:
        function(**job["arguments"], **({"ready": answer} if waits else {}))
    except ValueError as error:
        answer(str(error))
    else:
        answer()


def _find_slimrl(folder: Path) -> None:
    """Make the package of this folder the one that is imported, with that part of its API which needs no package."""
    spec = importlib.util.spec_from_file_location(
        "slimrl", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["slimrl"] = package
    spec.loader.exec_module(package)
    sys.modules["slimrl.api"] = importlib.import_module("slimrl.agent.isolation.light_api")


if __name__ == "__main__":
    main()
