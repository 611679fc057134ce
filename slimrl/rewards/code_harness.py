"""A program for the sandbox that runs tests against a program of the policy, in two processes that share only data.

`code.py` sends this text to the sandbox, after that of code_values.py, with the program and the tests on stdin. It
needs the standard library only.

1. The process makes its memory and descriptors unreadable to others, and forks before it has read the tests, so the
   child's memory does not hold them. The child closes stdin and the verdict's stream, and runs the policy's program.
2. The parent reads the tests and runs them one by one. It imports nothing from where the program may write. The names
   that the program has to give (code_checks.py) are asked of the child over a pipe, which answers with a value as JSON,
   an exception, or the number of an object that stays with the child. All other names are Python's own.
3. It prints one line for each test: `pass` or `fail`. A test is passed if nothing was raised, at least one check held,
   the program was asked for something, and it had every name that it was asked for.

What the policy's program changes (builtins, unittest, `__eq__`, exit functions, files) it changes in its own process.
Everything that comes from there is data of Python's own types, and no comparison ever runs its code.
"""

import builtins
import ctypes
import importlib
import inspect
import json
import math
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TextIO

from slimrl.rewards.code_values import SHARED, decode, encode, is_behaviour, make_arrays, share

PR_SET_DUMPABLE = 4
LENGTH_BYTES = 10
SOLUTION = "solution"
"""Name of the module that holds the policy's program."""
RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Relative and absolute tolerance of a result where an expected number has a fraction"""
ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
"""Raised within a test's `all(map(...))` they would end it as if all were well."""

ACTIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "len": len,
    "iterator": iter,
    "next": next,
    "next if any": lambda target: list(islice(target, 1)),
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
}
"""What is done with an object of the program's, but for its attributes and calls"""


class PolicyError(BaseException):
    """The policy's program ended, lacks a name, or raised something that is no exception of Python's own. A test that
    expects an exception does not mean this one."""


def serve(code: str, before: str, requests: TextIO, replies: TextIO) -> None:
    """The child: run the policy's program, and answer what is asked of it.

    Args:
        before: code whose names the program may use as those of Python. They are not names that it has given.
    """
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
        if request["do"] == "set":
            return setattr(target, request["name"], decode(request["value"], objects.__getitem__))
        if request["do"] in ACTIONS:
            return ACTIONS[request["do"]](target)
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

    def begin() -> None:
        given = {"__name__": SOLUTION}
        exec(compile(before, "<before>", "exec"), given)
        share(given, SOLUTION)
        vars(module)["__builtins__"] = {**vars(builtins), **given}
        exec(compile(code, "<solution>", "exec"), vars(module))

    make_arrays()
    answer(begin)
    for line in requests:
        answer(partial(ask, json.loads(line)))


class Policy:
    """The parent's end of the pipe to the process that runs the policy's program."""

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self.requests, self.replies = requests, replies
        self.asked = 0
        self.broken = False
        """Whether the program has ended, or lacked a name: no test goes on as if it had raised an exception that was
        expected."""

    def name(self, name: str) -> Any:
        try:
            return self.ask(do="name", name=name)
        except KeyError:
            self.broken = True
            raise PolicyError(f"the program has no {name}") from None

    def ask(self, **request: Any) -> Any:
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        return self.read()

    def read(self) -> Any:
        line = self.replies.readline()
        if not line:
            self.broken = True
            raise PolicyError("the program has ended")
        reply = json.loads(line)
        self.asked += 1
        if "raised" in reply:
            kind = getattr(builtins, reply["raised"], None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ENDS_OF_LOOPS):
                raise kind(reply["text"])
            raise PolicyError(reply["raised"], reply["text"])
        try:
            return decode(reply["value"], lambda number: StandIn(self, number), self.refuse)
        except Exception as error:
            self.broken = True
            raise PolicyError("the program has given what is no value") from error

    def refuse(self, number: int) -> None:
        """An object of the program's within one of a class of the tests: methods of the class would ask it what to say.

        Raises PolicyError."""
        self.broken = True
        raise PolicyError(f"object {number} stands within one of a class of the tests")


class StandIn:
    """An object of the policy's program: it can be called, gone through and counted, and its attributes read and set,
    but for those that a class of the tests has as methods. Two of them are never equal."""

    def __init__(self, policy: Policy, number: int) -> None:
        vars(self).update(_policy=policy, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if any(is_behaviour(owner, name) for owner in SHARED.values()):
            # The test means the method of its own class, not one with which the program judges itself.
            self._policy.broken = True
            raise PolicyError(f"the program's object is asked for {name}, a method of a class of the tests")
        return self._policy.ask(do="attribute", of=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._policy.ask(do="set", of=self._number, name=name, value=encode(value, number_of))

    def _do(self, what: str) -> Any:
        return self._policy.ask(do=what, of=self._number)

    def __bool__(self) -> bool:
        return self._do("bool")

    def __len__(self) -> int:
        return self._do("len")

    def __iter__(self) -> Iterator[Any]:
        iterator = self._do("iterator")
        while found := iterator._do("next if any"):
            yield found[0]

    def __next__(self) -> Any:
        return self._do("next")

    def __enter__(self) -> Any:
        return self._do("enter")

    def __exit__(self, *_: object) -> None:
        """Is told of no exception, and holds none back."""
        self._do("exit")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._policy.ask(do="call", of=self._number, arguments=encode((arguments, named), number_of))


def number_of(value: StandIn) -> int:
    """Raises AttributeError for an object of the test's own, which the program cannot be given."""
    return value._number


class Names(dict[str, Any]):
    """The names of a test. Those that it lacks are Python's own or the program's, as is said of each."""

    def __init__(self, policy: Policy, python: dict[str, str], program: list[str]) -> None:
        super().__init__(__name__="__main__", __checked__=self.count)
        self.checks = 0
        self._policy, self._python, self._program = policy, python, program

    def count(self) -> None:
        self.checks += 1

    def __missing__(self, name: str) -> Any:
        if name in self._program:
            return self._policy.name(name)
        if name not in self._python:
            raise KeyError(name)
        module, _, attribute = self._python[name].partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found


def run_text(text: str, given: dict[str, Any], counted: Callable[[str], Any], policy: Policy) -> bool:
    """Whether a test in Python is passed. Raises if it fails: a statement, a function `test...`, or a method of a class
    of tests."""
    names = Names(policy, given["python"], given["program"])
    before = policy.asked
    exec(compile(given["setup"], "<setup>", "exec"), names)
    share(names, "__main__")
    exec(compile(counted(text), "<test>", "exec"), names)
    for name, value in list(names.items()):
        own = isinstance(value, type) and value.__module__ == "__main__"
        if own and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.wasSuccessful(), name
        elif own and name.startswith("Test"):
            run_class(value)
        elif name.startswith("test") and type(value) is types.FunctionType and takes_nothing(value):
            value()
    return names.checks > 0 and policy.asked > before


def run_class(tests: type) -> None:
    """The methods of a class of tests as pytest runs them, each on an object of its own."""
    optional(tests, "setup_class")()
    for name in [name for name in dir(tests) if name.startswith("test")]:
        one = tests()
        optional(one, "setup_method")()
        getattr(one, name)()
        optional(one, "teardown_method")()
    optional(tests, "teardown_class")()


def optional(owner: Any, name: str) -> Callable[[], Any]:
    """A method that may not be there; pytest gives it the test's method if it takes one."""
    method = getattr(owner, name, None)
    if method is None:
        return lambda: None
    return method if takes_nothing(method) else partial(method, None)


def takes_nothing(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def run_call(function: str, arguments: list[Any], expected: list[Any], policy: Policy) -> bool:
    """Whether a function, or a method of a new object of the class Solution, returns one of the expected results."""
    try:
        target = getattr(policy.ask(do="name", name="Solution")(), function)
    except (KeyError, AttributeError):
        target = policy.name(function)
    result = as_json(target(*map(with_numbers, arguments)))
    return any(near(result, as_json(one)) for one in expected)


def near(result: Any, expected: Any) -> bool:
    """Whether they are equal, but that a number may be near an expected fraction, as near as a printed one."""
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(near(*pair) for pair in zip(result, expected))  # noqa: B905
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(near(result[key], expected[key]) for key in expected)
    if type(result) in (int, float) and isinstance(expected, float) and math.isfinite(expected):
        size = min(abs(expected), 1) if expected.is_integer() else abs(expected)
        return result == expected or abs(result - expected) <= ABSOLUTE + RELATIVE * size
    return bool(result == expected)


def with_numbers(argument: Any) -> Any:
    """An argument whose keys are numbers if they were before JSON made them texts, as APPS and TACO read it."""
    if isinstance(argument, dict) and argument and all(key.lstrip("-").isdecimal() for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def as_json(value: Any) -> Any:
    """A value as it would come back from JSON, where there are no tuples and keys are texts."""
    if isinstance(value, (list, tuple)):
        return [as_json(one) for one in value]
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    return value


def solution(policy: Policy) -> types.ModuleType:
    """The module that tests may import the policy's names from."""

    def ask(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return policy.name(name)

    module = types.ModuleType(SOLUTION)
    vars(module)["__getattr__"] = ask
    return module


def split() -> tuple[Policy, dict[str, Any], int]:
    """Fork. The child runs the policy's program and ends; returns the policy and the tests to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # before there is a child that could look
    program = json.loads(read(int(read(LENGTH_BYTES))))
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
        serve(program["code"], program["before"], reader, writer)
        os._exit(0)
    return Policy(writer, reader), json.loads(tests), verdicts


def read(count: int) -> bytes:
    """So many bytes of stdin, and no more."""
    data = b""
    while len(data) < count:
        data += os.read(0, count - len(data)) or sys.exit("stdin has ended")
    return data


def leave_what_the_program_writes() -> None:
    """Import nothing from the working directory, where a module of the program would run in this process."""
    here = os.path.realpath(os.getcwd())
    sys.path[:] = [place for place in sys.path if os.path.isabs(place) and os.path.realpath(place) != here]
    os.chdir("/")


def main() -> None:
    policy, given, verdicts = split()
    leave_what_the_program_writes()
    checks = types.ModuleType("checks")
    sys.modules["checks"] = checks
    exec(compile(given["checks"], "<checks>", "exec"), vars(checks))
    policy.read()
    sys.modules[SOLUTION] = solution(policy)
    tests: list[Callable[..., bool]] = [partial(run_text, text, given, checks.counted) for text in given["texts"]]
    tests += [partial(run_call, given["function"], *pair) for pair in given["calls"]]
    for test in tests:
        try:
            verdict = b"pass\n" if test(policy=policy) and not policy.broken else b"fail\n"
        except BaseException:  # noqa: BLE001 - whatever the test raised
            verdict = b"fail\n"
        policy.broken = False
        os.write(verdicts, verdict)
    os._exit(0)


main()
