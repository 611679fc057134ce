"""Rows in the columns that data sets of programs are published with: for each a right, a wrong and an idle program.

The tasks are made up; the columns and the forms of the tests are those of openai/human-eval, google-research's MBPP,
hendrycks/apps, FlagOpen/TACO, LiveCodeBench, newfacade/LeetCodeDataset and verl's files for prime_code.
"""

# ruff: noqa: E501
import base64
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Item:
    source: str
    form: str
    """What of the form the row shows"""
    row: dict[str, Any]
    """The columns as published"""
    keys: Mapping[str, str]
    """`data.keys` of the file"""
    right: str
    wrong: str
    idle: str


IDLES = (
    "pass",
    "print('no idea')",
    "import sys\nsys.exit(0)",
    "print()",
    "def solve(*_):\n    return None",
    "class Solution:\n    pass",
    "import os\nos._exit(0)",
)
ITEMS: list[Item] = []


def _add(source: str, form: str, row: dict[str, Any], keys: Mapping[str, str], right: str, wrong: str) -> None:
    ITEMS.append(Item(source, form, row, keys, right, wrong, IDLES[len(ITEMS) % len(IDLES)]))


# HumanEval: the prompt is the beginning of the program, `check` is called by whoever runs the test.


def _human_eval(form: str, entry: str, prompt: str, test: str, right: str, wrong: str) -> None:
    test = "\n\nMETADATA = {\n    'author': 'us',\n    'dataset': 'test'\n}\n\n\ndef check(candidate):\n" + test
    row = {
        "task_id": f"HumanEval/{len(ITEMS)}",
        "prompt": prompt,
        "entry_point": entry,
        "canonical_solution": "",
        "test": test,
    }
    _add("HumanEval", form, row, {"prompt": "prompt", "label": "test"}, right, wrong)


_human_eval(
    "asserts of equality", "near_pairs",
    'from typing import List\n\n\ndef near_pairs(values: List[float], gap: float) -> int:\n    """ Count neighbours that are at most gap apart.\n    >>> near_pairs([1.0, 1.5, 4.0], 1.0)\n    1\n    """\n',
    "    assert candidate([1.0, 1.5, 4.0], 1.0) == 1\n    assert candidate([], 1.0) == 0\n    assert candidate([3.0, 2.5, 2.0], 0.5) == 2\n",
    "def near_pairs(values: List[float], gap: float) -> int:\n    return sum(abs(a - b) <= gap for a, b in zip(values, values[1:]))",
    "def near_pairs(values, gap):\n    return len(values) // 2",
)  # fmt: skip
_human_eval(
    "an answer that only has the new function", "undo_shift",
    'def shift(text: str):\n    """ Move each small letter three on. """\n    return "".join(chr((ord(c) - 97 + 3) % 26 + 97) for c in text)\n\n\ndef undo_shift(text: str):\n    """ The text that shift made text of. """\n',
    "    from random import randint, choice\n    import string\n\n    letters = string.ascii_lowercase\n    for _ in range(20):\n        text = ''.join(choice(letters) for i in range(randint(5, 10)))\n        assert candidate(shift(text)) == text\n",
    "def undo_shift(text):\n    return ''.join(chr((ord(c) - 97 - 3) % 26 + 97) for c in text)",
    "def shift(text):\n    return text\n\ndef undo_shift(text):\n    return text",
)  # fmt: skip
_human_eval(
    "a helper of the prompt judges", "root_of",
    'import math\n\n\ndef poly(xs: list, x: float):\n    """ The polynomial with coefficients xs at x. """\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\ndef root_of(xs: list):\n    """ A zero of a polynomial of degree one. """\n',
    "    import math\n    import copy\n    for xs in ([2, 1], [-6, 3], [1, 8]):\n        assert math.fabs(poly(xs, candidate(copy.deepcopy(xs)))) < 1e-4\n",
    "def root_of(xs):\n    return -xs[0] / xs[1]",
    "def poly(xs, x):\n    return 0\n\ndef root_of(xs):\n    return 1",
)  # fmt: skip
_human_eval(
    "a tolerance", "spread",
    'def spread(values):\n    """ Mean distance from the mean. """\n',
    "    assert abs(candidate([1.0, 2.0, 3.0]) - 2.0 / 3.0) < 1e-6\n    assert abs(candidate([4.0, 4.0]) - 0.0) < 1e-6\n",
    "def spread(values):\n    mean = sum(values) / len(values)\n    return sum(abs(v - mean) for v in values) / len(values)",
    "def spread(values):\n    return max(values) - min(values)",
)  # fmt: skip
_human_eval(
    "messages and `assert True`", "flip_words",
    'def flip_words(text):\n    """ The words in the opposite order. """\n',
    "\n    # Check some simple cases\n    assert True, \"This prints if this assert fails 1 (good for debugging!)\"\n    assert candidate('ab c') == 'c ab', \"Error\"\n    assert candidate('') == ''\n",
    "def flip_words(text):\n    return ' '.join(reversed(text.split()))",
    "def flip_words(text):\n    return text[::-1]",
)  # fmt: skip
_human_eval(
    "None is a right result", "first_even",
    'def first_even(values):\n    """ The first even number, or None. """\n',
    "    assert candidate([]) is None\n    assert candidate([1, 3]) == None\n    assert candidate([1, 4, 6]) == 4\n",
    "def first_even(values):\n    return next((v for v in values if v % 2 == 0), None)",
    "def first_even(values):\n    return None",
)  # fmt: skip
_human_eval(
    "tuples", "sum_and_product",
    'from typing import List, Tuple\n\n\ndef sum_and_product(numbers: List[int]) -> Tuple[int, int]:\n    """ Both of a list. """\n',
    "    assert candidate([]) == (0, 1)\n    assert candidate([3, 5, 7]) == (3 + 5 + 7, 3 * 5 * 7)\n",
    "import math\ndef sum_and_product(numbers):\n    return sum(numbers), math.prod(numbers)",
    "def sum_and_product(numbers):\n    return [sum(numbers), 1]",
)  # fmt: skip
_human_eval(
    "the program has its own helper", "nth_prime",
    'def nth_prime(n: int):\n    """ The n-th prime number, from 1. """\n',
    "    assert candidate(1) == 2\n    assert candidate(10) == 29\n",
    "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))\n\ndef nth_prime(n):\n    x = 1\n    while n:\n        x += 1\n        n -= is_prime(x)\n    return x",
    "def nth_prime(n):\n    return 2 * n + 1",
)  # fmt: skip
_human_eval(
    "loops and booleans", "is_sorted",
    'def is_sorted(values):\n    """ Whether no value is less than the one before it. """\n',
    "    for values, expected in (([], True), ([1, 1, 2], True), ([2, 1], False)):\n        assert candidate(values) is expected\n",
    "def is_sorted(values):\n    return all(a <= b for a, b in zip(values, values[1:]))",
    "def is_sorted(values):\n    return True",
)  # fmt: skip
_human_eval(
    "a dict of counts", "letter_counts",
    'def letter_counts(text):\n    """ How often each letter comes. """\n',
    "    assert candidate('abca') == {'a': 2, 'b': 1, 'c': 1}\n    assert candidate('') == {}\n",
    "from collections import Counter\ndef letter_counts(text):\n    return Counter(text)",
    "def letter_counts(text):\n    return {c: 1 for c in text}",
)  # fmt: skip

# MBPP: lists of asserts; the sanitized rows have imports, the others code that is run before.


def _mbpp(
    form: str, tests: list[str], right: str, wrong: str, imports: list[str] = (), setup: str | None = None
) -> None:
    task = {"task_id": len(ITEMS), "code": "", "test_list": tests}
    if setup is None:
        row = {"source_file": "some.ipynb", "prompt": f"Task {len(ITEMS)}.", "test_imports": list(imports)} | task
        _add("MBPP, sanitized", form, row, {"prompt": "prompt", "label": "test_list"}, right, wrong)
    else:
        row = {"text": f"Task {len(ITEMS)}.", "test_setup_code": setup, "challenge_test_list": []} | task
        _add("MBPP", form, row, {"prompt": "text", "label": "test_list"}, right, wrong)


_mbpp(
    "sets around results",
    ["assert set(shared((3, 4, 5),(5, 7, 4))) == set((4, 5))", "assert set(shared((1, 2),(3, 4))) == set()"],
    "def shared(a, b):\n    return tuple(set(a) & set(b))",
    "def shared(a, b):\n    return a",
)
_mbpp(
    "`import math` of the row",
    [
        "assert math.isclose(disk_area(10), 314.15, rel_tol=0.001)",
        "assert math.isclose(disk_area(5), 78.54, rel_tol=0.001)",
    ],
    "import math\ndef disk_area(r):\n    return math.pi * r * r",
    "class math:\n    isclose = staticmethod(lambda *_, **__: True)\ndef disk_area(r):\n    return 1",
    imports=["import math"],
)
_mbpp(
    "a module that the test does not import",
    ["assert math.isclose(cube_root(27), 3)", "assert math.isclose(cube_root(8), 2)"],
    "def cube_root(x):\n    return x ** (1 / 3)",
    "class math:\n    isclose = staticmethod(lambda *_, **__: True)\ndef cube_root(x):\n    return x",
    setup="",
)
_mbpp(
    "a function called `check`",
    ["assert check(70) == False", "assert check(73) == True"],
    "def check(n):\n    return 2 * int(str(n)[::-1]) == n + 1",
    "def check(n):\n    return True",
)
_mbpp(
    "a function called `test_...`",
    ["assert test_repeats([1, 2, 2]) == True", "assert test_repeats([1, 2]) == False"],
    "def test_repeats(values):\n    return len(set(values)) < len(values)",
    "def test_repeats(values):\n    return False",
)
_mbpp(
    "a function called as one of Python's",
    ["assert sum(10,15)==6", "assert sum(100,150)==93"],
    "def sum(a, b):\n    return __builtins__.sum(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0)".replace(
        "__builtins__.sum", "__import__('builtins').sum"
    ),
    "def sum(a, b):\n    return 6",
)
_mbpp(
    "objects of the program's class",
    ["assert depth(root) == 2", "assert depth(root.left) == 1"],
    "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\ndef depth(node):\n    return 0 if node is None else 1 + max(depth(node.left), depth(node.right))",
    "class Node:\n    def __init__(self, data):\n        self.data = data\ndef depth(node):\n    return 2",
    setup="root = Node(1)\r\nroot.left = Node(2)",
)
_mbpp(
    "objects of the row's class", ["assert total(Pair(1, 2)) == 3", "assert total(Pair(5, 5)) == 10"],
    "def total(pair):\n    return pair.first + pair.second", "def total(pair):\n    return 3",
    setup="class Pair(object):\n    def __init__(self, first, second):\n        self.first = first\n        self.second = second",
)  # fmt: skip
_mbpp(
    "a list, the outer brackets in place",
    ["assert squares([1, 2, 3])==([1, 4, 9])", "assert squares([])==([])"],
    "def squares(values):\n    return list(map(lambda x: x ** 2, values))",
    "def squares(values):\n    return map(lambda x: x ** 2, values[:-1])",
    setup="",
)
_mbpp(
    "Counter without an import",
    ["assert Counter(letters('aab')) == Counter({'a': 2, 'b': 1})", "assert Counter(letters('')) == Counter()"],
    "def letters(text):\n    return list(text)",
    "class Counter:\n    def __init__(self, *_): pass\n    def __eq__(self, other): return True\ndef letters(text):\n    return text[:1]",
    setup="",
)
_mbpp(
    "numbers of 55 digits",
    ["assert bell(2)==2", "assert bell(56)==6775685320645824322581483068371419745979053216268760300"],
    "def bell(n):\n    row = [1]\n    for _ in range(n):\n        new = [row[-1]]\n        for x in row:\n            new.append(new[-1] + x)\n        row = new\n    return row[0]",
    "def bell(n):\n    return 2 if n == 2 else 6.775685320645824e54",
)

# APPS and TACO: JSON text of inputs and outputs, by stdin or, with fn_name, as arguments in a list.
_APPS = {"prompt": "question", "label": "input_output"}


def _apps(form: str, tests: dict[str, Any], right: str, wrong: str, starter: str = "") -> None:
    row = {
        "problem_id": len(ITEMS),
        "question": "A task.",
        "solutions": "[]",
        "input_output": json.dumps(tests),
        "difficulty": "interview",
        "url": "",
        "starter_code": starter,
    }
    _add("APPS", form, row, _APPS, right, wrong)


def _taco(form: str, tests: dict[str, Any], right: str, wrong: str) -> None:
    row = {
        "question": "A task.",
        "solutions": "[]",
        "starter_code": "",
        "input_output": json.dumps(tests),
        "difficulty": "EASY",
        "raw_tags": "[]",
        "name": None,
        "source": "codewars",
        "tags": "[]",
        "skill_types": "[]",
        "url": "",
        "time_limit": None,
    }
    _add("TACO", form, row, _APPS, right, wrong)


_apps(
    "stdin",
    {"inputs": ["3\n", "10\n"], "outputs": ["6\n", "20\n"]},
    "print(2 * int(input()))",
    "print(int(input()) + 3)",
)
_apps(
    "stdin of several lines",
    {"inputs": ["2\n1 2\n3 4\n", "1\n5 6\n"], "outputs": ["3\n7\n", "11\n"]},
    "for _ in range(int(input())):\n    print(sum(map(int, input().split())))",
    "n = int(input())\nprint(3)\nprint(7)",
)
_apps(
    "texts as lists of lines",
    {"inputs": [["2", "a", "b"], ["1", "c"]], "outputs": [["b", "a"], ["c"]]},
    "import sys\nlines = sys.stdin.read().split()[1:]\nprint('\\n'.join(reversed(lines)))",
    "import sys\nprint(*sys.stdin.read().split()[1:], sep='\\n')",
)
_apps(
    "printed fractions",
    {"inputs": ["1 3\n", "1 4\n"], "outputs": ["0.3333333333\n", "0.25\n"]},
    "a, b = map(int, input().split())\nprint(a / b)",
    "a, b = map(int, input().split())\nprint(round(a / b, 2))",
)
_apps(
    "white space at the ends of lines",
    {"inputs": ["3\n", "2\n"], "outputs": ["1 2 3 \n", "1 2 \n\n"]},
    "print(*range(1, int(input()) + 1))",
    "print(*range(int(input())))",
)
_apps(
    "a function, results in a list of one",
    {"fn_name": "twice", "inputs": [[3], ["ab"]], "outputs": [[6], ["abab"]]},
    "def twice(x):\n    return x * 2",
    "def twice(x):\n    return x",
)
_apps(
    "a function of several arguments",
    {"fn_name": "clamp", "inputs": [[5, 1, 3], [0, 1, 3], [2, 1, 3]], "outputs": [[3], [1], [2]]},
    "def clamp(x, low, high):\n    return max(low, min(high, x))",
    "def clamp(x, low, high):\n    return high",
)
_apps(
    "a function whose result is a list",
    {"fn_name": "tails", "inputs": [[[1, 2]], [[]]], "outputs": [[[1, 2], [2], []], [[]]]},
    "def tails(xs):\n    return [xs[i:] for i in range(len(xs) + 1)]",
    "def tails(xs):\n    return [xs]",
)
_apps(
    "tuples for lists",
    {"fn_name": "ends", "inputs": [[[1, 2, 3]], [["a"]]], "outputs": [[[1, 3]], [["a", "a"]]]},
    "def ends(xs):\n    return xs[0], xs[-1]",
    "def ends(xs):\n    return xs[0]",
)
_apps(
    "a class Solution that imports nothing",
    {"fn_name": "longest", "inputs": [[["a", "bcd"]], [["xy", "z"]]], "outputs": ["bcd", "xy"]},
    "class Solution:\n    def longest(self, words: List[str]) -> str:\n        return max(words, key=len)",
    "class Solution:\n    def longest(self, words: List[str]) -> str:\n        return words[0]",
    starter="class Solution:\n    def longest(self, words: List[str]) -> str:\n        ",
)
_taco(
    "stdin",
    {"inputs": ["5\n", "0\n"], "outputs": ["15\n", "0\n"]},
    "n = int(input())\nprint(n * (n + 1) // 2)",
    "n = int(input())\nprint(n * 2)",
)
_taco(
    "`fn_name` is null",
    {"fn_name": None, "inputs": ["abc\n", "\n"], "outputs": ["cba\n", "\n"]},
    "print(input()[::-1])",
    "print(input())",
)
_taco(
    "words in capitals",
    {"inputs": ["4\n", "7\n"], "outputs": ["YES\n", "NO\n"]},
    "print('YES' if int(input()) % 2 == 0 else 'NO')",
    "print('YES')",
)
_taco(
    "numbers beyond 64 bits",
    {"inputs": ["30\n", "5\n"], "outputs": ["265252859812191058636308480000000\n", "120\n"]},
    "import math\nprint(math.factorial(int(input())))",
    "import math\nprint(math.gamma(int(input()) + 1))",
)
_taco(
    "a function",
    {"fn_name": "is_leap", "inputs": [[2000], [1900], [2024]], "outputs": [[True], [False], [True]]},
    "def is_leap(y):\n    return y % 4 == 0 and (y % 100 != 0 or y % 400 == 0)",
    "def is_leap(y):\n    return y % 4 == 0",
)
_taco(
    "keys that were numbers",
    {"fn_name": "total", "inputs": [[{"1": 2, "3": 4}], [{"5": 6}]], "outputs": [[14], [30]]},
    "def total(counts):\n    return sum(key * value for key, value in counts.items())",
    "def total(counts):\n    return sum(counts.values())",
)
_taco(
    "a dict as result",
    {"fn_name": "by_length", "inputs": [[["a", "bb", "c"]], [[]]], "outputs": [[{"1": ["a", "c"], "2": ["bb"]}], [{}]]},
    "def by_length(words):\n    found = {}\n    for word in words:\n        found.setdefault(len(word), []).append(word)\n    return found",
    "def by_length(words):\n    return {}",
)
_taco(
    "a function without arguments",
    {"fn_name": "answer", "inputs": [[]], "outputs": [[42]]},
    "def answer():\n    return 42",
    "def answer():\n    return 41",
)

# LiveCodeBench: lists of cases as JSON text, the private ones also packed; arguments as JSON, one a line.


def _lcb(
    form: str, cases: list[tuple[str, str]], right: str, wrong: str, function: str = "", *, packed: bool = False
) -> None:
    kind = "functional" if function else "stdin"
    text = json.dumps([{"input": given, "output": expected, "testtype": kind} for given, expected in cases])
    private = base64.b64encode(zlib.compress(pickle.dumps(text))).decode() if packed else text
    row = {
        "question_title": "A task", "question_content": "A task.", "platform": "leetcode" if function else "atcoder", "question_id": str(len(ITEMS)),
        "contest_id": "c", "contest_date": "2024-01-01T00:00:00", "starter_code": "", "difficulty": "easy", "public_test_cases": text,
        "private_test_cases": private, "metadata": json.dumps({"func_name": function} if function else {}),
    }  # fmt: skip
    _add("LiveCodeBench", form, row, {"prompt": "question_content", "label": "private_test_cases"}, right, wrong)


_lcb(
    "stdin",
    [("3\n1 2 3\n", "6\n"), ("1\n-4\n", "-4\n")],
    "input()\nprint(sum(map(int, input().split())))",
    "input()\nprint(6)",
)
_lcb("stdin, packed", [("abc\n", "3\n"), ("\n", "0\n")], "print(len(input()))", "print(3)", packed=True)
_lcb(
    "the same numbers, written otherwise",
    [("1\n", "0.50"), ("3\n", "1.50")],
    "print(int(input()) / 2)",
    "print(int(input()) // 2)",
)
_lcb(
    "stdin under `__main__`",
    [("2 3\n", "5"), ("1 1\n", "2")],
    "def main():\n    print(sum(map(int, input().split())))\n\nif __name__ == '__main__':\n    main()",
    "if __name__ == '__main__':\n    print(5)",
)
_lcb(
    "several answers",
    [("2\n1 2\n3 4\n", "2\n12\n"), ("1\n5 5\n", "25\n")],
    "for _ in range(int(input())):\n    a, b = map(int, input().split())\n    print(a * b)",
    "input()\nprint(2, 12)",
)
_lcb(
    "a method",
    [("[3, 1, 2]\n2", "5"), ("[7]\n1", "7")],
    "class Solution:\n    def top(self, nums: List[int], k: int) -> int:\n        return sum(sorted(nums)[-k:])",
    "class Solution:\n    def top(self, nums: List[int], k: int) -> int:\n        return sum(nums)",
    "top",
)
_lcb(
    "a method, packed",
    [('"abca"', "2"), ('"xyz"', "1")],
    "class Solution:\n    def most(self, s: str) -> int:\n        return max(Counter(s).values())",
    "class Solution:\n    def most(self, s: str) -> int:\n        return 1",
    "most",
    packed=True,
)
_lcb(
    "a function beside no class",
    [("[[1, 2], [3]]", "[1, 2, 3]"), ("[]", "[]")],
    "def flat(parts):\n    return [x for part in parts for x in part]",
    "def flat(parts):\n    return parts",
    "flat",
)
_lcb(
    "true and null",
    [("[2, 4]", "true"), ("[]", "null"), ("[1]", "false")],
    "class Solution:\n    def evens(self, nums):\n        return all(x % 2 == 0 for x in nums) if nums else None",
    "class Solution:\n    def evens(self, nums):\n        return bool(nums)",
    "evens",
)
_lcb(
    "state of an object",
    [("3", "1"), ("5", "1")],
    "class Solution:\n    def __init__(self):\n        self.calls = 0\n    def count(self, n):\n        self.calls += 1\n        return self.calls",
    "class Solution:\n    calls = 0\n    def count(self, n):\n        Solution.calls += 1\n        return Solution.calls",
    "count",
)

# LeetCodeDataset: as HumanEval, the entry point is a method, and the prompt has imports and helpers.
_LEETCODE = """import random
import functools
import collections
import math
from typing import *
from functools import *
from collections import *
from itertools import *
from heapq import *
from bisect import *
from string import *
from operator import *
from math import *

inf = float('inf')

class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

def list_node(values: list):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head
"""


def _leetcode(form: str, method: str, asserts: list[str], right: str, wrong: str) -> None:
    test = "def check(candidate):\n" + "".join(f"    assert candidate({one}\n" for one in asserts)
    head = f"class Solution:\n    def {method}(self, "
    row = {"task_id": method, "prompt": _LEETCODE, "entry_point": f"Solution().{method}", "test": test, "completion": "", "query": "A task.",
           "response": "", "input_output": [{"input": "nums = [1]", "output": "1"}], "meta": {"lang_code": head}}  # fmt: skip
    _add("LeetCodeDataset", form, row, {"prompt": "query", "label": "test"}, head + right, head + wrong)


_leetcode(
    "named arguments",
    "pairSum",
    ["nums = [3,3], target = 6) == [0, 1]", "nums = [1,2,4], target = 6) == [1, 2]"],
    "nums: List[int], target: int) -> List[int]:\n        return next([i, j] for i, j in combinations(range(len(nums)), 2) if nums[i] + nums[j] == target)",
    "nums, target):\n        return [0, 1]",
)
_leetcode(
    "names of the prompt's imports",
    "commonDivisor",
    ["nums = [4, 6]) == 2", "nums = [9, 27]) == 9"],
    "nums: List[int]) -> int:\n        return reduce(gcd, nums)",
    "nums):\n        return 2",
)
_leetcode(
    "infinity",
    "smallest",
    ["nums = [3, 1]) == 1", "nums = []) == inf"],
    "nums):\n        return min(nums, default=inf)",
    "nums):\n        return inf",
)
_leetcode(
    "texts",
    "reverseWords",
    ['s = "a b") == "b a"', 's = "") == ""'],
    "s: str) -> str:\n        return ' '.join(s.split()[::-1])",
    "s):\n        return s",
)
_leetcode(
    "matrices",
    "transposed",
    ["matrix = [[1,2],[3,4]]) == [[1,3],[2,4]]", "matrix = [[5]]) == [[5]]"],
    "matrix):\n        return [list(row) for row in zip(*matrix)]",
    "matrix):\n        return matrix",
)
_leetcode(
    "a heap",
    "kthLargest",
    ["nums = [5,1,4], k = 2) == 4", "nums = [1], k = 1) == 1"],
    "nums, k):\n        return nlargest(k, nums)[-1]",
    "nums, k):\n        return max(nums)",
)
_leetcode(
    "a cached method",
    "steps",
    ["n = 4) == 5", "n = 30) == 1346269"],
    "n: int) -> int:\n        @cache\n        def f(i):\n            return 1 if i < 2 else f(i - 1) + f(i - 2)\n        return f(n)",
    "n):\n        return n + 1",
)
_leetcode(
    "booleans",
    "isPath",
    ["edges = [[0,1]], a = 0, b = 1) == True", "edges = [], a = 0, b = 1) == False"],
    "edges, a, b):\n        return [a, b] in edges",
    "edges, a, b):\n        return True",
)
_leetcode(
    "fractions",
    "half",
    ["x = 3) == 1.5", "x = 0) == 0"],
    "x: int) -> float:\n        return x / 2",
    "x):\n        return x // 2",
)
_leetcode(
    "bisection",
    "place",
    ["nums = [1,3,5], x = 4) == 2", "nums = [], x = 1) == 0"],
    "nums, x):\n        return bisect_left(nums, x)",
    "nums, x):\n        return 2",
)

_leetcode(
    "linked lists",
    "doubled",
    [
        "head = list_node([1, 2])).next.val == 4",
        "head = list_node(list(range(2000)))).next.next.val == 4",
        "head = None) is None",
    ],
    "head: Optional[ListNode]) -> Optional[ListNode]:\n        return ListNode(2 * head.val, self.doubled_loop(head.next)) if head else None\n\n    def doubled_loop(self, node):\n        first = last = ListNode()\n        while node:\n            last.next = last = ListNode(2 * node.val)\n            node = node.next\n        return first.next",
    "head):\n        return head",
)

# verl's files: the tests as JSON text within reward_model.


def _verl(form: str, tests: Any, right: str, wrong: str) -> None:
    row = {"data_source": "taco", "prompt": [{"role": "user", "content": "A task."}], "ability": "code",
           "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)}, "extra_info": {"split": "train", "index": len(ITEMS)}}  # fmt: skip
    _add("verl", form, row, {"prompt": "prompt", "label": "reward_model.ground_truth"}, right, wrong)


_verl("stdin", {"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]}, "print(int(input()) ** 2)", "print(9)")
_verl(
    "a function, arguments as JSON",
    {"fn_name": "minus", "inputs": ["5\n3", "0\n2"], "outputs": ["2", "-2"]},
    "def minus(a, b):\n    return a - b",
    "def minus(a, b):\n    return b - a",
)
_verl(
    "a method",
    {"fn_name": "join", "inputs": ['["a", "b"]\n"-"', '[]\n"-"'], "outputs": ['"a-b"', '""']},
    "class Solution:\n    def join(self, parts: List[str], by: str) -> str:\n        return by.join(parts)",
    "class Solution:\n    def join(self, parts, by):\n        return ''.join(parts)",
)
_verl(
    "a list of cases",
    [
        {"input": "2\n", "output": "4", "testtype": "stdin", "metadata": {"func_name": None}},
        {"input": "5\n", "output": "10", "testtype": "stdin", "metadata": {"func_name": None}},
    ],
    "print(2 * int(input()))",
    "print(4)",
)
_verl(
    "a list of calls",
    [
        {"input": "[1, 2]", "output": "2", "testtype": "functional", "metadata": {"func_name": "size"}},
        {"input": "[]", "output": "0", "testtype": "functional", "metadata": {"func_name": "size"}},
    ],
    "class Solution:\n    def size(self, xs):\n        return len(xs)",
    "class Solution:\n    def size(self, xs):\n        return 2",
)
_verl(
    "a list of asserts",
    ["assert halve(4) == 2", "assert halve(10) == 5"],
    "def halve(x):\n    return x // 2",
    "def halve(x):\n    return 2",
)
_verl(
    "an `if` that raises AssertionError",
    ["for n in (1, 5):\n    if twice(n) != 2 * n:\n        raise AssertionError(n)"],
    "def twice(n):\n    return 2 * n",
    "def twice(n):\n    return 2",
)


RIGHT, WRONG, IDLE = 1.0, 0.0, 0.0
