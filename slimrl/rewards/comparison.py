"""A program that compares answers symbolically, one after the other, each within a CPU time limit.

`comparers.py` starts it as `python -P comparison.py SECONDS`. It imports nothing of slimrl.

1. It imports math-verify and compares one pair to warm up; it prints `true` when it is ready.
2. It reads answer and label from stdin, a JSON list per line, and prints `true` or `false`.
3. If a comparison takes more than SECONDS of CPU time, the kernel ends the process with SIGXCPU. An exception would not
   do, since math-verify and sympy catch exceptions of all kinds.
4. It ends at the end of stdin, and so with the process that started it.
"""

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from math_verify import parse, verify


def equivalent(answer: str, label: str) -> bool:
    """Whether two answers, in LaTeX as within \\boxed{}, are mathematically equal. May take arbitrarily long."""
    # math-verify's own limits are of wall-clock time.
    gold = parse(f"\\boxed{{{label}}}", parsing_timeout=None)
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


@contextmanager
def cpu_limit(seconds: int) -> Iterator[None]:
    """Have the kernel end this process if the block takes more than `seconds` of CPU time, rounded up."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def main() -> None:
    # Libraries must not print among the answers, nor log to the driver's terminal.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.getLogger().addHandler(logging.NullHandler())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(sys.argv[1])
    print(json.dumps(equivalent("2\\sqrt{2}", "\\sqrt{8}")), file=answers, flush=True)
    for line in sys.stdin:
        answer, label = json.loads(line)
        with cpu_limit(seconds):
            same = equivalent(answer, label)
        print(json.dumps(same), file=answers, flush=True)


if __name__ == "__main__":
    main()
