"""A program for the sandbox that runs tests against a program of the policy, in two processes that share only data.

`code.py` sends this file's text to the sandbox, with the policy's program and the tests on stdin. It needs the standard
library only.

1. The process makes its memory and descriptors unreadable to others, and forks before it has read the tests, so the
   child's memory does not hold them. The child closes stdin and the verdict's stream, and runs the policy's program.
2. The parent reads the tests and runs them one by one. Names that a test uses and neither defines nor finds in Python
   are those of the policy's program: a stand-in asks the child over a pipe, and gets a value as JSON, an exception, or
   the number of an object that stays with the child.
3. It prints one line for each test: `pass` or `fail`.

What the policy's program changes (builtins, unittest, `__eq__`, exit functions, files) it changes in its own process.
Everything that comes from there is data of Python's own types, and no comparison ever runs its code.
"""

import builtins
import ctypes
import json
import os
import sys
import types
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

PR_SET_DUMPABLE = 4
LENGTH_BYTES = 10
SOLUTION = "solution"
"""Name of the module that holds the policy's program."""
ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
"""Raised within a test's `all(map(...))` they would end it as if all were well."""
PLAIN: tuple[type, ...] = (float, str)
LARGEST_DECIMAL = 2**63
WAYS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class PolicyError(Exception):
    """The policy's program ended, or raised something that is no exception of Python's own."""


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON; what is no plain data goes through `keep`, which gives the number of a kept object."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # Python writes and reads no decimal number of more than 4300 digits.
        return int(value) if abs(int(value)) < LARGEST_DECIMAL else {"int": hex(value)}
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in WAYS.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    return {"object": keep(value)}


def decode(value: Any, find: Callable[[int], Any]) -> Any:
    """The inverse of `encode`; `find` gives the object of a number."""
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    if name == "object":
        return find(inner)
    if name == "int":
        return int(inner, 16)
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "complex":
        return complex(*inner)
    if name == "dict":
        return {decode(key, find): decode(item, find) for key, item in inner}
    return WAYS[name]([decode(item, find) for item in inner])


def serve(code: str, requests: TextIO, replies: TextIO) -> None:
    """The child: run the policy's program, and answer what is asked of it."""
    module = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = module
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def ask(request: dict[str, Any]) -> Any:
        if request["do"] == "name":
            return vars(module)[request["name"]]
        target = objects[request["of"]]
        if request["do"] == "attribute":
            return getattr(target, request["name"])
        arguments, named = decode(request["arguments"], objects.__getitem__)
        return target(*arguments, **named)

    def answer(action: Callable[[], Any]) -> None:
        try:
            reply = {"value": encode(action(), keep)}
        except BaseException as error:  # noqa: BLE001 - whatever the program raised
            known = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            reply = {"raised": known, "text": str(error)[:1000]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    answer(lambda: exec(compile(code, "<solution>", "exec"), vars(module)))
    for line in requests:
        answer(partial(ask, json.loads(line)))


class Policy:
    """The parent's end of the pipe."""

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self.requests, self.replies = requests, replies

    def ask(self, **request: Any) -> Any:
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        return self.read()

    def read(self) -> Any:
        line = self.replies.readline()
        if not line:
            raise PolicyError("the program has ended")
        reply = json.loads(line)
        if "raised" in reply:
            kind = getattr(builtins, reply["raised"], None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDS_OF_LOOPS):
                raise kind(reply["text"])
            raise PolicyError(reply["raised"], reply["text"])
        return decode(reply["value"], lambda number: StandIn(self, number))


class StandIn:
    """An object of the policy's program: it can be called and has attributes. Two of them are never equal."""

    def __init__(self, policy: Policy, number: int) -> None:
        self._policy, self._number = policy, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._policy.ask(do="attribute", of=self._number, name=name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        sent = encode((arguments, named), lambda value: value._number)
        return self._policy.ask(do="call", of=self._number, arguments=sent)


class Names(dict[str, Any]):
    """The names of a test; those that it lacks are the policy's, if Python does not have them either."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(__name__="tests")
        self._policy = policy

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._policy.ask(do="name", name=name)


def run_test(code: str, policy: Policy) -> None:
    """Raises if a test fails: a statement, a function `test...`, or a method of a TestCase."""
    names = Names(policy)
    exec(compile(code, "<test>", "exec"), names)
    for name, value in list(names.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value is not unittest.TestCase:
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.testsRun, name
            assert result.wasSuccessful(), name
        elif name.startswith("test") and type(value).__name__ == "function":
            value()


def solution(policy: Policy) -> types.ModuleType:
    """The module that tests may import the policy's names from."""

    def ask(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return policy.ask(do="name", name=name)

    module = types.ModuleType(SOLUTION)
    vars(module)["__getattr__"] = ask
    return module


def split() -> tuple[Policy, list[str], int]:
    """Fork. The child runs the policy's program and ends; returns the policy and the tests to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # before there is a child that could look
    code = read(int(read(LENGTH_BYTES)))
    requests, replies = os.pipe(), os.pipe()
    child = os.fork() == 0
    mine = (requests[0], replies[1]) if child else (replies[0], requests[1])
    for end in {*requests, *replies} - {*mine}:
        os.close(end)
    tests = b"" if child else b"".join(iter(lambda: os.read(0, 65536), b""))
    nothing = os.open(os.devnull, os.O_RDWR)
    verdicts = -1 if child else os.dup(1)
    for number in range(3):
        os.dup2(nothing, number)
    reader, writer = os.fdopen(mine[0], "r"), os.fdopen(mine[1], "w")
    if child:
        serve(code.decode(), reader, writer)
        os._exit(0)
    return Policy(writer, reader), json.loads(tests), verdicts


def read(count: int) -> bytes:
    """So many bytes of stdin, and no more."""
    data = b""
    while len(data) < count:
        data += os.read(0, count - len(data)) or sys.exit("stdin has ended")
    return data


def main() -> None:
    policy, tests, verdicts = split()
    policy.read()
    sys.modules[SOLUTION] = solution(policy)
    for code in tests:
        try:
            run_test(code, policy)
            verdict = b"pass\n"
        except BaseException:  # noqa: BLE001 - whatever the test raised
            verdict = b"fail\n"
        os.write(verdicts, verdict)
    os._exit(0)


main()
