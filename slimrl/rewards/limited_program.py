"""A program that answers requests about the policy's texts, one after the other, each within a CPU time limit.

`limited_processes.py` starts it as `python -P limited_program.py FILE SECONDS BYTES`. It imports nothing of slimrl.

1. It runs FILE, a Python file with a function `answer` of a request and a WARM_UP, the request whose answer shows that
   all is imported; it prints `true` when it is ready.
2. It reads requests from stdin, a JSON value per line, and prints the answer, or in a JSON text the exception that the
   request raised.
3. If a request takes more than SECONDS of CPU time, the kernel ends the process with SIGXCPU. An exception would not
   do, since libraries catch exceptions of all kinds.
4. It may add BYTES of address space to what it has when it is ready.
5. It ends at the end of stdin, and so with the process that started it.
"""

import json
import logging
import math
import os
import resource
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cpu_limit(seconds: int) -> Iterator[None]:
    """Have the kernel end this process if the block takes more than `seconds` of CPU time, rounded up."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def limit_memory(added_bytes: int) -> None:
    """Have the kernel refuse this process more than `added_bytes` of address space on top of what it has."""
    with open("/proc/self/statm") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + added_bytes, size_bytes + added_bytes))


def main() -> None:
    # Libraries must not print among the answers, nor log to the driver's terminal.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.getLogger().addHandler(logging.NullHandler())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds, memory_bytes = map(int, sys.argv[2:])
    work = runpy.run_path(sys.argv[1], run_name=sys.argv[1])
    work["answer"](work["WARM_UP"])
    print(json.dumps(True), file=answers, flush=True)
    limit_memory(memory_bytes)
    for line in sys.stdin:
        said: Any
        try:
            with cpu_limit(seconds):
                said = work["answer"](json.loads(line))
        except Exception as error:  # noqa: BLE001 - who asked says it; the next request is another one
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
