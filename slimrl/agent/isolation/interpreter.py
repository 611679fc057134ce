"""Starts a function of slimrl's in another process, with this interpreter or that of a virtual environment."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import slimrl

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
END_S = 20.0
"""Seconds that a process may take to end when its input has ended"""


class OtherInterpreter:
    """A process that runs one function.

    Args:
        python: the interpreter.
        call: import path of the function, `module:function`.
        arguments: of the function, as JSON has them.
    """

    def __init__(self, python: Path, call: str, arguments: Mapping[str, Any]) -> None:
        folders, installed = [folder or os.getcwd() for folder in sys.path], (sys.prefix, sys.base_prefix)
        job = {
            "slimrl": str(Path(slimrl.__file__).parent),
            "light": python != Path(sys.executable),
            # Where the user's own modules are; the packages of this interpreter are none of the other's.
            "path": [folder for folder in folders if not any(map(Path(folder).is_relative_to, installed))],
            "call": call,
            "arguments": dict(arguments),
        }
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env["PYTHONHASHSEED"] = "0"  # sets of texts have the same order in every run
        # A process that has threads of numpy's neither forks well nor may enter a namespace.
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [str(python), str(BOOTSTRAP)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # Not among the arguments of the command, which every user of the machine can read.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def await_line(self, timeout_s: float) -> Any:
        """Wait until the function says that it is ready, or has returned: then what it returned, as JSON has it.

        Raises:
            ValueError: what the function raised as such, or that it ended otherwise or took too long.
        """
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        readable = poll.poll(timeout_s * 1000)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            raise ValueError("it ended; see its output" if readable else f"it was not ready within {timeout_s:g} s")
        answer = json.loads(line)
        if "problem" in answer:
            raise ValueError(answer["problem"])
        return answer["result"]

    def end(self) -> None:
        """End the process by the end of its input; kill it if it does not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def call_elsewhere(python: Path, call: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """What a function returns in another process, as JSON has it, when that has ended.

    Raises:
        ValueError: what the function raised as such, or that it ended otherwise or took too long.
    """
    process = OtherInterpreter(python, call, arguments)
    try:
        return process.await_line(timeout_s)
    finally:
        process.end()
