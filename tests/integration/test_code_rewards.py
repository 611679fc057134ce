"""Code by tests in the real sandbox: honest programs, and programs that try to pass without being right."""

import asyncio
import logging

import pytest
from cheating_programs import AGAINST, FUNCTION, OUTPUT, PRINTED
from reward_cases import asked, said
from sandboxes import needs_namespaces

from slimrl.agent.sandbox.interface import SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig, SandboxLimits
from slimrl.rewards.code import CodeTests
from slimrl.rewards.parts import Part
from slimrl.rewards.services import NotStarted, RewardServices

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LIMITS = {"wall_s": 6.0, "cpu_s": 2}
ASSERTS = ["assert double(2) == 4", "assert double(10**20) == 2 * 10**20", "assert double('ab') == 'abab'"]
CASES = {"inputs": ["2\n", "21"], "outputs": ["4\n", "42\n"]}
UNITTEST = """
import unittest
from solution import Stack

class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack([1, (2, 3)])

    def test_pop(self):
        self.assertEqual(self.stack.pop(), (2, 3))
        self.assertEqual(self.stack.pop(), 1)
        with self.assertRaises(IndexError):
            self.stack.pop()

    def test_attribute(self):
        self.assertEqual(self.stack.name, "stack")
"""
STACK = """
class Stack:
    name = "stack"
    def __init__(self, items):
        self.items = list(items)
    def pop(self):
        return self.items.pop()
"""
FUNCTIONS = """
def test_one():
    assert double(3) == 6

def test_two():
    assert all(double(i) == 2 * i for i in range(5))
"""
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\ncheck(double)"
DATA = (
    "assert echo([1, (2.5, None), {3}, {'a': b'x', (1, 2): [True]}, frozenset(), 1j, float('inf')])"
    " == [1, (2.5, None), {3}, {'a': b'x', (1, 2): [True]}, frozenset(), 1j, float('inf')]"
)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def graded(runner):
    """The reward of a program by tests, by their fraction; one sandbox for all tests of this file."""
    pool = SandboxPool(SandboxConfig(limits=SandboxLimits(**LIMITS)))
    reward = CodeTests(credit="fraction", sandbox=pool)
    runner.run(reward.start())
    yield lambda code, tests: runner.run(reward(said(f"So:\n```python\n{code}\n```\n"), asked(tests)))
    runner.run(pool.close())


@needs_namespaces
@pytest.mark.parametrize(
    ("code", "tests", "fraction"),
    [
        ("def double(x): return x + x", ASSERTS, 1),
        ("def double(x): return 2 * int(x)", ASSERTS, 2 / 3),
        ("def triple(x): return 3 * x", ASSERTS, 0),
        ("def double(x: return", ASSERTS, 0),
        ("print(2 * int(input()))", CASES, 1),
        ("print(2 * int(input()))\nexit()\nprint(0)", CASES, 1),
        ("print(2 * int(input()))\nquit(0)\nprint(0)", CASES, 1),
        ("print(2 * int(input()))\nexit(1)", CASES, 0),
        ("def near(x): return [x + 0.2, 10**400, 3]",
         {"fn_name": "near", "inputs": [[0.1], [0.2], [0.1]],
          "outputs": [[0.3, 10**400, 3], [0.41, 10**400, 3], [0.3, 10**400, 3.5]]}, 1 / 3),
        ("print('4  '); print()", CASES, 0.5),
        ("print(2 * int(input())); 1 / 0", CASES, 0),
        (STACK, UNITTEST, 1),
        (STACK.replace("pop()", "pop(0)"), UNITTEST, 0),
        ("def double(x): return x + x", [FUNCTIONS, CHECK], 1),
        ("def double(x): return 2 if x == 1 else 6", [FUNCTIONS, CHECK], 0),
        ("def echo(x): return x", [DATA], 1),
        ("import numpy as np\ndef double(x): return np.asarray(x) * 2", ["assert double([1, 2]) == [2, 4]"], 1),
        ("import math\ndef factorial(n): return math.factorial(n)",
         ["import math\nassert factorial(5000) == math.factorial(5000)", "assert factorial(3) == 6"], 1),
        ("def twice(n): return 2 * n", ["assert twice(10**5000) == 2 * 10**5000", "assert twice(-(10**5000)) < 0"], 1),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'", ["assert P(3).x == 3"], 1),
    ],
)  # fmt: skip
def test_honest_programs_get_the_fraction_that_they_pass(graded, code, tests, fraction):
    assert graded(code, tests) == pytest.approx(fraction)


KINDS = """
from collections import *
from dataclasses import dataclass
from datetime import *
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
class Color(Enum):
    RED = 1
class Level(IntEnum):
    LOW = 1
Point = namedtuple("Point", "x y")
@dataclass(slots=True)
class Box:
    side: int
    inner: object = None
VALUES = [
    Fraction(1, 3), Decimal("1.50"), date(2020, 2, 29), datetime(2020, 1, 1, 2, 3, 4, 5, timezone.utc), time(1, 2),
    timedelta(days=-1, seconds=5), deque([1, (2,)]), range(1, 9, 2), Counter("aab"), OrderedDict(a=1),
    Color.RED, Level.LOW, Point(1, Point(2, 3)), Box(3, Box(4, Color.RED)), -(2**70), Fraction(2**70, 3),
    [None, {True: b"x"}],
]
"""
USES = [
    "assert all(double([one])[0] == one and type(double([one])[0]) is type(one) for one in VALUES)",
    "import numpy as np\nassert double(np.array([1, 2])) == [2, 4] and double(np.array([[1.5]])) == [[3.0]]",
    "assert double(Color.RED) is Color.RED",
]
OBJECTS = """
import itertools
class Held:
    closed = False
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __enter__(self): return self
    def __exit__(self, *_):
        self.closed = True
        return True
def numbers(first): return itertools.count(first)
def pairs(table): return table.items()
Pair = __import__("collections").namedtuple("Pair", "a b")
"""
ASKS = [
    "assert len(Held([1, 2])) == 2 and list(Held([3, 4])) == [3, 4] and 4 in Held([4])",
    "assert Held([1]) and not Held([])",
    "from itertools import islice\nfound = numbers(3)\nassert list(islice(found, 2)) == [3, 4] and next(found) == 5",
    "with Held([1]) as held:\n    assert held.items == [1] and not held.closed\nassert held.closed",
    "assert sorted(pairs({1: 2})) == [(1, 2)]",
    "assert Pair(1, 2).b == 2 and Pair(1, 2) == (1, 2)",
]


@needs_namespaces
def test_values_and_what_objects_answer_reach_the_tests(graded):
    echo = "import numpy\ndef double(x): return x * 2 if isinstance(x, numpy.ndarray) else x"
    assert graded(echo, {"test_list": USES, "test_setup_code": KINDS}) == 1
    assert graded(echo, {"test_list": ["assert double(3) == 6"], "test_setup_code": KINDS}) == 0
    assert graded(OBJECTS, {"test_list": ASKS}) == 1


LISTED = ["assert all(map(lambda i: double(i) == 2 * i, [1, 2]))", "assert all([double(1) == 2, double(2) == 4])"]


@needs_namespaces
@pytest.mark.parametrize("name", FUNCTION)
def test_no_cheat_passes_a_test(graded, name):
    assert graded(FUNCTION[name], [*ASSERTS, *LISTED, UNITTEST]) == 0


@needs_namespaces
@pytest.mark.parametrize("name", OUTPUT)
def test_no_cheat_prints_what_is_expected(graded, name):
    assert graded(OUTPUT[name], CASES) == 0


@needs_namespaces
@pytest.mark.parametrize("name", AGAINST)
def test_no_cheat_against_the_tests_is_paid(graded, name):
    code, tests = AGAINST[name]
    assert graded(code, tests) == 0


@needs_namespaces
@pytest.mark.parametrize("name", PRINTED)
def test_no_number_is_near_every_number(graded, name):
    assert graded(PRINTED[name], {"inputs": ["1", "2"], "outputs": ["0.5", "0.25"]}) == 0


HONEST = [
    ("def double(x): return Node(2 * x)", "methods of an object of the row's class"),
    ("def double(x): return Node(2 * x)", "an object with the methods of the row's class"),
    ("def double(x): return x + x", "its own math"),
    ("def double(x): return x + x", "its own numpy"),
    ("def double(x): return x + x", "its own Counter, isclose and deepcopy"),
    ("def double(x): return x + x", "its own re"),
    ("def double(x): return x + x", "its own helper of the prompt"),
    ("def double(x): return x + x", "modules of Python's beside the tests"),
    ("def double(x): return x + x", "a module of Python's that the test imports"),
    ("def double(x): return x + x", "no name where an exception is expected"),
    ("def double(x): return x + x", "an end where an exception is expected"),
    ("from math import gcd", "nothing, where the program begins with what is asked for"),
    ("def nothing(x): other(x)", "an unfinished function of the prompt"),
    ("def double(x): return x + x", "empties what it is given"),
    ("def double(x): return list(x)", "nothing to be checked"),
    ("def double(x): return {'result': 2 * x}", "a dict that has every key"),
    ("class Solution:\n    def double(self, x): return x + x", "a Solution and a function that differ"),
]


@needs_namespaces
@pytest.mark.parametrize(("code", "name"), HONEST)
def test_an_honest_program_is_paid_where_a_cheat_is_not(graded, code, name):
    tests = AGAINST[name][1]
    if name == "no name where an exception is expected":
        tests = [text.replace("KeyError", "TypeError") for text in tests]
    assert graded(code, tests) == 1


@needs_namespaces
async def test_all_must_be_passed_unless_a_fraction_is_asked_for():
    pool = SandboxPool(SandboxConfig(limits=SandboxLimits(**LIMITS)))
    reward = CodeTests(sandbox=pool, tests_key="hidden")
    await reward.start()
    try:
        for code, tests, value in [
            ("print(4)", CASES, 0),
            ("print(2 * int(input()))", CASES, 1),
            ("def double(x): return 2 * int(x)", ASSERTS, 0),
            ("def double(x): return x + x", ASSERTS, 1),
        ]:
            assert await reward(said(f"```\n{code}\n```"), asked(hidden=tests)) == value
        assert await reward(said("double is x + x"), asked(hidden=ASSERTS)) == 0
        assert (
            await reward(said(None, before=[{"role": "tool", "content": f"```\n{code}\n```"}]), asked(hidden=ASSERTS))
            == 0
        )
        with pytest.raises(ValueError, match=r"metadata\.hidden: has no tests"):
            await reward(said("```\nx\n```"), asked(hidden=None))
    finally:
        await pool.close()


@needs_namespaces
async def test_time_is_bounded_for_many_cases():
    pool = SandboxPool(SandboxConfig(limits=SandboxLimits(wall_s=3.0)))
    reward = CodeTests(credit="fraction", sandbox=pool)
    await reward.start()
    try:
        many = {"inputs": [str(number) for number in range(100)], "outputs": ["1"] * 100}
        code = "import time\nprint(1, flush=True)\nif input() == '2': time.sleep(60)"
        assert await reward(said(f"```\n{code}\n```"), asked(many)) == pytest.approx(0.02)
    finally:
        await pool.close()


async def test_a_sandbox_that_does_not_run_is_said_before_the_first_rollout(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    part = Part(
        name="tests", function=CodeTests(sandbox=SandboxPool(SandboxConfig())), path="slimrl.rewards.code:CodeTests"
    )
    with pytest.raises(NotStarted, match=r"tests \(slimrl\S+\): start failed: .*(bwrap|unshare)"):
        await RewardServices([part]).start()


async def test_a_sandbox_that_fails_fails_the_trajectory(caplog):
    caplog.set_level(logging.ERROR)
    pool = SandboxPool(SandboxConfig(backend=SandboxBackend.remote, url="http://127.0.0.1:9"))
    reward = CodeTests(sandbox=pool)
    with pytest.raises(SandboxError):
        await reward.start()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"credit": "some"}, "credit: 'some' is neither all nor fraction"),
        ({"total_s": 0}, "total_s"),
    ],
)
def test_wrong_settings_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        CodeTests(sandbox=SandboxPool(SandboxConfig()), **settings)
