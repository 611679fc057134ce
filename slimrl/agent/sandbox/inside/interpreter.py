"""Runs a task's code in a process that is confined: once, or again and again in a session.

A session reads code from its channel, each piece ended by a NUL, and answers each with its exit status and a newline.
"""

import atexit
import builtins
import gc
import importlib
import json
import linecache
import os
import random
import sys
import tarfile
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

from slimrl.agent.sandbox.inside.confine import WORK

SHELL = "bash"
SHELL_SESSION = """
while IFS= read -r -d '' code <&3; do
    eval "$code" </dev/null 3>&-
    printf '%d\\n' $? >&3
done
"""
"""Program of a shell session, for bash: it reads code from the channel, which is descriptor 3, and runs it."""
FILE_NAME = "<code>"
COMMON = (
    "numpy.random", "numpy.linalg", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "re", "statistics", "string", "time", "typing",
)  # fmt: skip
"""Modules that are imported once, so that programs need not."""


def run(task_file: int, channel: int | None, folder: int | None) -> NoReturn:
    """Read the task, run it and end the process.

    Args:
        task_file: JSON, an object with `language` and `code`.
        channel: of a session.
        folder: a tar file, which is unpacked to WORK.
    """
    with open(task_file) as text:
        task = json.load(text)
    if folder is not None:
        with open(folder, "rb") as file, tarfile.open(fileobj=file) as archive:
            archive.extractall(WORK, filter="fully_trusted")
    if os.path.isdir(WORK):
        os.chdir(WORK)
    if task["language"] == "shell":
        _run_shell(task["code"], channel)
    main = _fresh_interpreter()
    status = _run_code(task["code"], main) if channel is None else _serve(channel, main)
    _leave(status)


def _run_shell(code: str, channel: int | None) -> NoReturn:
    if channel is None:
        os.execvp(SHELL, [SHELL, "-c", code])
    os.dup2(channel, 3)
    os.set_inheritable(3, True)  # dup2 leaves it as it was if it is 3 already
    os.execvp(SHELL, [SHELL, "-c", SHELL_SESSION])


def warm(packages: list[str]) -> None:
    """Import what programs use, then hide what the warm interpreter itself is made of. Done once, before any fork."""
    for name in packages:
        importlib.import_module(name)
    for name in COMMON:
        # Those of numpy only where that is; numpy itself imports them when they are first used.
        if "." not in name or name.split(".")[0] in packages:
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "slimrl"]:
        del sys.modules[name]
    sys.path.remove("/sandbox")
    sys.argv[:] = [""]
    # Python's module site, which does not run here, gives programs these two.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def _fresh_interpreter() -> dict[str, Any]:
    """The names of the module `__main__`, in an interpreter with streams and random generators of its own."""
    sys.path.insert(0, os.getcwd())
    # The streams of the warm interpreter were made for other files.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if number else "surrogateescape"
        stream = os.fdopen(number, "w" if number else "r", 1, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.enable()
    return sys.modules["__main__"].__dict__


def _run_code(code: str, names: dict[str, Any]) -> int:
    """The exit status of Python code; a traceback goes to stderr, without the frames of this file."""
    linecache.cache[FILE_NAME] = (len(code), None, code.splitlines(keepends=True), FILE_NAME)
    try:
        exec(compile(code, FILE_NAME, "exec", dont_inherit=True), names)
    except SystemExit as error:
        return _exit_status(error.code)
    except BaseException as error:  # noqa: BLE001 - whatever the program raised
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _serve(channel: int, names: dict[str, Any]) -> int:
    waiting = b""
    while True:
        code, end, waiting = waiting.partition(b"\0")
        if end:
            status = _run_code(code.decode(), names)
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(channel, b"%d\n" % status)
            continue
        waiting = code
        more = os.read(channel, 65536)
        if not more:
            return 0
        waiting += more


def _leave(status: int) -> NoReturn:
    """The end of a Python process: its threads, exit functions and buffers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the program may have replaced any of these
        status = status or 1
    os._exit(status)
