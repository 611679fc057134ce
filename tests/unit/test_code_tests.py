"""Tests of programs as they stand in data: which are taken, what they mean, and which are refused when read."""

# ruff: noqa: E501
import asyncio
import base64
import json
import pickle
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from published_tests import ITEMS
from reward_cases import asked, said

from slimrl.agent.sandbox.interface import Ended, Result
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig
from slimrl.config.schema.reward import RewardConfig, RewardPartConfig
from slimrl.data.prompts import read_prompts
from slimrl.rewards import code_checks, code_tests
from slimrl.rewards.code import CodeTests, program_block, same_output
from slimrl.rewards.code_checks import Code, counted, parsed, sources
from slimrl.rewards.code_tests import PRELUDE, Calls, Cases, Texts, read_tests
from slimrl.rewards.loading import Supplies, load_rewards, refuse_unjudged

CHECK = "def check(candidate):\n    assert candidate(1) == 2"


def read(label, **metadata):
    return read_tests(asked(label, **metadata))


def test_json_text_means_what_it_says():
    tests = {"inputs": ["3\n", ["a", "b"]], "outputs": ["6\n", "c"]}
    assert read(tests) == read(json.dumps(tests)) == Cases([("3\n", "6\n"), ("a\nb", "c")])
    calls = {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [[3], [4]]}
    assert read(calls) == read(json.dumps(calls)) == Calls("f", [([1, "a"], [[3], 3]), ([2, "b"], [[4], 4])])
    assert read({**calls, "outputs": [[3], [4, 5]]}) == Calls("f", [([1, "a"], [[3]]), ([2, "b"], [[4, 5]])])
    assert read('["assert f(1) == 2"]').texts == read(["assert f(1) == 2"]).texts == ["assert f(1) == 2"]
    row = {"fn_name": "f", "inputs": ['1\n"a"'], "outputs": ['{"b": null}']}
    assert read(row) == Calls("f", [([1, "a"], [{"b": None}])])


def test_packed_cases_are_read_and_not_unpickled(tmp_path):
    class Writes:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    cases = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    assert read(packed(cases)) == Cases([("1", "2")])
    for harmful in (Writes(), [cases, Writes()], b"bytes", 7):
        with pytest.raises(ValueError, match=r"^label: the compressed tests are no pickle of one text"):
            read(packed(harmful))
    assert not (tmp_path / "touched").exists()


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_what_stands_beside_the_tests_is_found_in_the_metadata():
    tests = read(
        CHECK, entry_point="Solution().add", prompt="from typing import *\nclass Solution:\n    ...\nk = 3\nRun it."
    )
    assert isinstance(tests, Texts)
    assert tests.before == PRELUDE  # a prompt with words in it is no program
    tests = read(CHECK, entry_point="Solution().add", prompt="from typing import *\nclass Solution:\n    ...\nk = 3")
    assert tests.before == PRELUDE + "from typing import *\nk = 3"
    assert tests.texts == [f"{CHECK}\n\ncheck(Solution().add)\n"]
    assert tests.names.program == {"Solution"}
    assert read(f"{CHECK}\ncheck(add)").names.program == {"add"}
    tests = read(["assert f(root) == 1"], test_setup_code="root = Node(1)\r\nk = 2", test_imports=["import math"])
    assert tests.setup == "import math\nroot = Node(1)\nk = 2"
    assert tests.names.program == {"f", "Node"}


@pytest.mark.parametrize(
    ("tests", "python", "program"),
    [
        (["assert math.isclose(f(2), 5)"], {"math": "math"}, {"f"}),
        (["assert np.allclose(f(2), 5)", "assert f(3) == numpy.pi"], {"np": "numpy", "numpy": "numpy"}, {"f"}),
        (["assert f(2) == pytest.approx(5)"], {"pytest": "pytest"}, {"f"}),
        (["assert f(2) == approx(5)"], {"approx": "pytest:approx"}, {"f"}),
        (["assert re.match('a', f(2))"], {"re": "re"}, {"f"}),
        (["assert Counter(f(2)) == Counter('a')"], {"Counter": "collections:Counter"}, {"f"}),
        (["from math import *\nassert f(2) == gcd(4, 6)"], {}, {"f"}),
        (["from solution import *\nassert gcd(4, 6) == 2"], {"gcd": "math:gcd"}, set()),
        (["from solution import gcd\nassert gcd(4, 6) == 2"], {}, {"gcd"}),
        (["assert gcd(4, 6) == 2", "assert isclose(gcd(1, 1), 1)"], {"isclose": "math:isclose"}, {"gcd"}),
        (["assert sum(10, 15) == 6", "assert sum(1, max(1, 2)) == 1"], {}, {"sum"}),
        (["assert max(f(2)) == 3"], {}, {"f"}),
        (["assert [k for k in f(2)] == [x := 1, x]"], {}, {"f"}),
        (["def same(a, b=lambda: f):\n    global seen\n    seen = a\n    assert a == b()(1)\nsame(seen)"], {}, {"f"}),
        (["class T:\n    size = 3\n    def test(self):\n        assert f(self.size) == other\nT().test()"], {}, {"f", "other"}),
    ],
)  # fmt: skip
def test_names_of_python_come_from_python_and_others_from_the_program(tests, python, program):
    found = sources([Code(test) for test in tests], Code(""))
    assert (found.python, set(found.program)) == (python, program)


def test_a_label_names_no_module_that_is_imported_where_it_is_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    (tmp_path / "this.py").write_text("open(__file__ + '.ran', 'w')")
    for module in ("this", "os.nothing", "numpy"):
        with pytest.raises(
            ValueError, match=rf"^label: line 1: import the names of {module} one by one; of `import \*`"
        ):
            read([f"from {module} import *\nassert f(1) == 2"])
    assert [one.name for one in tmp_path.iterdir()] == ["this.py"]
    assert read(["from os.path import *\nassert f(1) == join('a')"]).names.program == {"f"}


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (None, "label: has no tests: null"),
        ([], r"label: has no tests: \[\]"),
        ("", 'label: has no tests: ""'),
        ([""], r"label: has no assert, so nothing is checked"),
        ({}, "label: has no tests; known keys are inputs"),
        ({"tests": ["assert f(1)"]}, "label: has no tests; known keys are inputs.*, and it has tests"),
        ({"inputs": [], "outputs": []}, "label: has 0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "label: has 1 inputs and 0 outputs"),
        ({"inputs": "1", "outputs": "2"}, "label: inputs and outputs must be lists"),
        ({"inputs": [3], "outputs": ["3"]}, r"label\.inputs\[0\]: must be a text or a list of lines, not 3. For calls of a function add its name, as fn_name; give the bare name"),
        ({"inputs": [[1, 2]], "outputs": [[3]]}, r"label\.inputs\[0\]: must be a text or a list of lines, not \[1, 2\]. For calls of a function add its name, as fn_name; give"),
        ({"fn_name": "Solution().add", "inputs": [[3]], "outputs": [[3]]}, r'fn_name: "Solution\(\).add" is no name of a function; give the bare name, such as `add`'),
        ("if f(1) != 2:\n    raise ValueError", "label: has no assert"),
        ("if f(1) != 2:\n    print(AssertionError)", "label: has no assert"),
        ("def helper():\n    if f(1) != 2:\n        raise AssertionError", "line 1: helper is never called"),
        ({"inputs": ["3"], "outputs": [["3", None]]}, r"label\.outputs\[0\]: must be a text or a list of lines"),
        ({"inputs": ["3", "4"], "outputs": ["", " \n"]}, "label: no output has any text"),
        ({"fn_name": 3, "inputs": [[3]], "outputs": [[3]]}, "fn_name: 3 is no name of a function"),
        ({"fn_name": "f", "inputs": [3], "outputs": [3]}, r"label\.inputs\[0\]: must be a list, not 3"),
        ({"fn_name": "f", "inputs": ["3", "x"], "outputs": ["3", "4"]}, r"label\.inputs\[1\]: begins as JSON does and is none"),
        ('{"inputs": ["3"], "outputs": ["3"]', "label: begins as JSON does and is none"),
        ([{"input": "1", "output": "2"}], r"label\[0\]: must be an object with input, output and testtype"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], r"functional tests need the function's name, metadata\.func_name; give the bare name"),
        ([{"input": "1", "output": "2", "testtype": "file"}], "testtype must be stdin in all cases, or functional"),
        (CHECK, "label: line 1: check is never called, so nothing is checked; `entry_point` names what to call it with"),
        ("def helper(x):\n    assert f(x)\nhelper2 = 3", "line 1: helper is never called"),
        ("async def test_f():\n    assert await f(1) == 2", "line 1: is asynchronous"),
        ("import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test(self):\n        self.assertTrue(1)", "line 3: is asynchronous"),
        (">>> add(1, 2)\n3", "label: line 1: is no Python: invalid syntax; a doctest has to be written with assert"),
        ('def f():\n    """\n    >>> f()\n    3\n    """', "has no assert"),
        ("add(1, 2) == 3", "label: line 1: has an expression and no assert"),
        (["assert f(1) == 2", "f(2) == 3"], r"label\[1\]: line 1: has an expression and no assert"),
        ("# to be written", "label: has no assert"),
        ("6", "label: line 1: has an expression and no assert"),
        ('"6"', "label: line 1: has an expression and no assert"),
        (6, "label: has no tests: 6"),
        ("assert f(lambda x: x + 1, 2) == 3", "label: line 1: gives the program a function"),
        ("def more(x):\n    return x + 1\nassert f(more, 2) == 3", "label: line 3: gives the program a function"),
        ({"test": "def check(candidate):\n    assert candidate(key=lambda x: x)", "entry_point": "f"}, "line 2: gives the program a function"),
        ("try:\n    f(1)\n    assert False\nexcept (KeyError, MyError):\n    assert True", "label: line 4: asks for the class MyError"),
        ("import pytest\ndef test_f():\n    with pytest.raises(MyError):\n        f(1)", "label: line 3: asks for the class MyError"),
        ("assert isinstance(f(1), Shape)", "label: line 1: asks for the class Shape"),
        ("xs = [3, 1]\nf(xs)\nassert xs == [1, 3]", "label: line 2: xs may be changed in place"),
        ({"test": "def check(candidate):\n    xs = [3, 1]\n    candidate(xs)\n    assert xs == [1, 3]", "entry_point": "f"}, "line 3: xs may be changed in place"),
        ("xs = [3, 1]\nSolution().sort(xs)\nassert xs == [1, 3]", "label: line 2: xs may be changed in place"),
        ("import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f()\nassert out.getvalue() == 'a'", "label: line 2: looks at what is printed"),
        ("import io, sys\nsys.stdout = io.StringIO()\nf()\nassert sys.stdout.getvalue() == 'a'", "label: line 2: looks at what is printed"),
        ("from unittest.mock import patch\nwith patch('builtins.print') as shown:\n    f()\nassert shown.called", "label: line 2: looks at what is printed"),
        ("nonlocal x\nassert f(1) == 2", "label: line 1: is no Python: nonlocal declaration not allowed at module level"),
        ("assert [x := 1 for x in f(1)]", "label: line 1: is no Python: assignment expression cannot rebind"),
        ("def g(a, a):\n    pass\nassert f(1) == 2", "label: line 1: is no Python: duplicate argument"),
        ("assert f(1) == 2\nreturn", "label: line 2: is no Python: 'return' outside function"),
        ({"test": CHECK, "entry_point": 5}, "^entry_point: must be a text, not 5"),
        ({"test": CHECK, "entry_point": ["f"]}, "^entry_point: must be a text, not "),
        ([{"input": "1", "output": "2", "testtype": ["stdin"]}], "testtype must be stdin in all cases, or functional"),
        ({"test_list": ["assert f(1)"], "test_setup_code": "import ("}, "^the code before the tests: line 1: is no Python"),
        ({"test": CHECK, "entry_point": "f", "prompt": f"x = {'1 + ' * 600}1"}, "^the code before the tests: is nested"),
        ("assert f(1) == 2\n  assert f(2)", "label: line 2: is no Python: unexpected indent"),
        ("import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n    assert f(x)", "line 3: test_f takes arguments; fixtures and parameters"),
        ("class TestF:\n    def test_f(self, capsys):\n        assert f(1)", "line 2: test_f takes arguments"),
        ("assert product(f(2)) == 3", "uses product, which Python has too"),
        ("assert gcd(lcm(1, 2), 3) == 1", "uses gcd, lcm, which Python has too"),
        ("assert True", "asks nothing of the program"),
        (["assert f(1) == 2", 3], r"label\[1\]: must be a text, not 3"),
    ],
)  # fmt: skip
def test_tests_that_check_nothing_or_mean_nothing_known_are_refused(label, problem):
    with pytest.raises(ValueError, match=problem):
        read(label)


def test_lists_beside_the_tests_may_be_json_text():
    found = read({"test_list": '["assert f(1) == 2"]', "test_imports": '["import math"]'})
    assert (found.texts, found.setup.strip()) == (["assert f(1) == 2"], "import math")


async def test_the_tests_of_a_prompt_whose_trajectories_end_together_are_read_once(monkeypatch):
    read = []
    monkeypatch.setattr("slimrl.rewards.code.read_tests", lambda prompt, _: read.append(prompt))
    reward = CodeTests(sandbox=SandboxPool(SandboxConfig()))
    prompt = asked(["assert f(1) == 2"])
    await asyncio.gather(*(reward._tests_of(prompt) for _ in range(16)))
    assert (len(read), len(reward._latest)) == (1, 1)


@pytest.mark.filterwarnings("error")
def test_code_that_python_warns_of_is_read_without_a_word():
    assert read(["assert f(1) is 2", "assert f('\\d') == 2"]).names.program == {"f"}


@pytest.mark.parametrize(
    "label",
    [
        "assert sorted(f(2), key=lambda x: -x) == [2, 1]",
        "xs = [3, 1]\nassert f(xs) == [1, 3] and xs == [3, 1]",
        "stack = f()\nstack.push([1])\nassert stack.pop() == [1]",
        "xs = [1]\nf(xs)\nassert f([2]) == 3",
        "try:\n    f(1)\n    assert False\nexcept ValueError:\n    assert isinstance(f(2), int)",
        "if __name__ == '__main__':\n    assert f(1) == 2",
        "if f(1) != 2:\n    raise AssertionError",
        "found = f(1)\nif found == 2:\n    pass\nelse:\n    print(found)\n    raise AssertionError(f'{found} is not 2')",
        "def test_f():\n    for i in range(3):\n        if f(i) != 2 * i:\n            raise AssertionError(i)",
        "class TestF:\n    def test_f(self):\n        assert f(1) == 2",
        "import unittest\nclass A(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\nif __name__ == '__main__':\n    unittest.main()",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        "import pytest\nwith pytest.raises(ValueError):\n    f(1)",
        "def helper(x):\n    assert f(x) == 2\ndef test_f():\n    helper(1)",
        f"{CHECK}\ndef test_all():\n    check(f)",
        "def test_values(x):\n    assert f(x) == 2\ntest_values(1)",
    ],
)  # fmt: skip
def test_tests_of_other_forms_are_taken(label):
    assert read(label).names.program == {"f"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Find a root.", "uses poly, which neither the test nor Python has; define it in the test's setup"),
        ("def poly(x):\n    return x\n\ndef root():\n    ...", None),
    ],
)
def test_what_judges_is_not_the_program_s_where_the_program_s_name_is_given(text, problem):
    prompt = asked("def check(candidate):\n    assert poly(candidate()) == 0", text, entry_point="root")
    if problem is None:
        assert read_tests(prompt).names.program == {"root"}
        return
    with pytest.raises(ValueError, match=problem):
        read_tests(prompt)


@pytest.mark.parametrize(
    ("packages", "backend", "problem"),
    [
        (
            ["numpy", "sympy"],
            SandboxBackend.bubblewrap,
            "tests need pytest, which agent.sandbox.packages does not give",
        ),
        (["pytest"], SandboxBackend.bubblewrap, None),
        ([], SandboxBackend.container, None),
    ],
)
def test_a_package_that_tests_need_must_be_in_the_sandbox(packages, backend, problem):
    reward = CodeTests(sandbox=SandboxPool(SandboxConfig(packages=packages, backend=backend)))
    prompt = asked(["assert f(1) == pytest.approx(2)", "import os.path\nassert f(2) == 3"])
    if problem is None:
        reward.check_prompt(prompt)
        return
    with pytest.raises(ValueError, match=problem):
        reward.check_prompt(prompt)


@pytest.mark.parametrize(
    "part",
    [
        RewardPartConfig(function="slimrl.rewards.code:CodeTests"),
        RewardPartConfig(
            function="slimrl.rewards.length:CosineLength",
            args={"of": "slimrl.rewards.code:CodeTests", "max_tokens": 100},
        ),
    ],
)
def test_a_row_is_refused_by_its_line_when_it_is_read(tmp_path, part):
    file = tmp_path / "rows.jsonl"
    rows = [("a", "assert f(1) == 2"), ("b", "f(1) == 2"), ("c", CHECK), ("other", "6")]
    file.write_text(
        "".join(
            json.dumps({"prompt": name, "label": label, "metadata": {"reward": "math" if name == "other" else "code"}}) + "\n"
            for name, label in rows
        )
    )  # fmt: skip
    settings = RewardConfig(
        function="", by_name={"code": part, "math": RewardPartConfig(function="slimrl.rewards.math:boxed_exact")}
    )
    supplies = Supplies({SandboxPool: SandboxPool(SandboxConfig())})
    rewards = load_rewards(settings, lambda _, call: call(), supplies)
    problems = refuse_unjudged(read_prompts(file), rewards)
    assert [line.split(": ", 1)[0] for line in problems] == [f"{file}:2", f"{file}:3"]
    assert "code (slimrl.rewards." in problems[0]
    assert "has an expression and no assert" in problems[0]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("6\n", "6", True),
        ("  6  \n\n", "6", True),
        ("6", "7", False),
        ("", "6", False),
        ("1 2\n3", "1 2 \n3\n", True),
        ("1\n2", "1 2", False),
        ("1 2 3", "1 2", False),
        ("1  2", "1 2", True),
        ("6.0", "6", True),
        ("6.00001", "6", False),
        ("1000000007", "1000000008", False),
        ("0.333333", "0.3333333333", True),
        ("0.3334", "0.3333333333", False),
        ("-0.5", "0.5", False),
        ("1e-3", "0.001", True),
        ("100000", "100001.0", False),
        ("99999.9999999", "100000.0", True),
        ("nan", "nan", True),
        ("nan", "0.5", False),
        ("inf", "1e9999", False),
        ("1_0", "10", False),
        ("YES", "yes", False),
        ("NaN 0.5", "0.5 0.5", False),
    ],
)
def test_printed_numbers_may_be_written_otherwise_and_fractions_be_near(printed, expected, same):
    assert same_output(printed, expected) is same


PROGRAM = "def f(x):\n    return x"
READER = "print(input())"


@pytest.mark.parametrize(
    ("text", "label", "program"),
    [
        (f"```python\n{PROGRAM}\n```\nUse:\n```python\nf(3)\nprint(f(4))\n```", ["assert f(1) == 1"], PROGRAM),
        (f"```python\n{PROGRAM}\n```\nIt prints\n```\n3\n```", ["assert f(1) == 1"], PROGRAM),
        (f"```\n{PROGRAM}\n```\nRun\n```bash\npython f.py\n```", ["assert f(1) == 1"], PROGRAM),
        (f"```\n{PROGRAM}\n```\nUse\n```python\nf(3)\n```", ["assert f(1) == 1"], PROGRAM),
        (f"```py\n{PROGRAM} + 1\n```\nBetter:\n```py\n{PROGRAM}\n```", ["assert f(1) == 1"], PROGRAM),
        (f"```Python3\n{PROGRAM}\n```\n```python\ng = 1\n```", '{"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}', PROGRAM),
        ("```python\nclass Solution:\n    ...\n```\n```python\nSolution().f(3)\n```", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}, "class Solution:\n    ..."),
        (f"```python\n{PROGRAM}\n```\n```python\nf(3)\n```", "from solution import f\nassert f(1) == 1", PROGRAM),
        ("```python\nf = len\n```\n```python\nassert f == len\n```", ["assert f('a') == 1"], "f = len"),
        (f"```python\n{READER}\n```\nInput\n```\n3\n```\nOutput\n```text\n3\n```", {"inputs": ["3"], "outputs": ["3"]}, READER),
        (f"```python\n{READER}\n```\nOr by hand\n```python\nprint(3)\n```", {"inputs": ["3"], "outputs": ["3"]}, READER),
        ("```python\nprint(1)\n```\n```\n1\n```", {"inputs": ["3"], "outputs": ["3"]}, "print(1)"),
        ("```python\nx = 1\n```\n```python\ny = 2\n```", ["assert f(1) == 1"], "y = 2"),
        (f"```python\n{PROGRAM}\n```\n```python\n{PROGRAM} + 1", ["assert f(1) == 1"], PROGRAM),
        ("No block.", ["assert f(1) == 1"], None),
        ("```python\n```", ["assert f(1) == 1"], None),
    ],
)  # fmt: skip
def test_the_program_is_the_block_that_the_tests_mean(text, label, program):
    assert program_block(text, read(label)) == program


@pytest.mark.parametrize(
    ("lines", "paid"), [(["pass"] * 2, 1), (["pass"] * 5, 0), (["pass", "fail"], 0.5), ([], 0), (["passed"] * 2, 0)]
)
async def test_verdicts_that_no_test_has_pay_nothing(lines, paid):
    class Judge:
        async def run(self, program, limits):
            stdout = "".join(f"{line}\n" for line in lines)
            return Result(stdout=stdout, stderr="", exit_status=0, ended=Ended.ok, seconds=0.1)

    reward = CodeTests(credit="fraction", sandbox=SandboxPool(SandboxConfig(), Judge()))
    assert await reward(said("```\ndef f(x): ...\n```"), asked(["assert f(1) == 1", "assert f(2) == 2"])) == paid


def test_no_form_of_a_source_is_there_twice():
    assert len(ITEMS) >= 60
    assert len({(item.source, item.form) for item in ITEMS}) == len(ITEMS)


CHECKED = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    ("label", "row", "counts"),
    [
        (CHECKED, {"entry_point": "f"}, {"assert candidate": 1, "def f(a)": 1}),
        (f"{CHECKED}check(f)\n", {"entry_point": "f"}, {"assert candidate": 2}),
        ("assert f(1) == 2", {}, {"assert f(1)": 1}),
        (["assert f(1) == 2", "assert f(2) == 3"], {}, {"assert f(1)": 1, "assert f(2)": 1}),
    ],
)
def test_a_text_of_a_row_is_parsed_once_and_again_only_if_it_calls_its_check_itself(monkeypatch, label, row, counts):
    texts = []

    def noted(text):
        texts.append(text)
        return parsed(text)

    for module in (code_checks, code_tests):
        monkeypatch.setattr(module, "parsed", noted)
    read_tests(asked(label, "import math\ndef f(a):\n    pass\n", **row))
    assert {mark: sum(mark in text for text in texts) for mark in counts} == counts


@pytest.mark.parametrize(
    "looks",
    ["redirect_stdout(a)", "a.redirect_stdout(a)", "g().redirect_stdout", "a.b.sys.stdout", "g('builtins.print')"],
)
def test_every_way_to_look_at_what_is_printed_is_refused(looks):
    with pytest.raises(ValueError, match="looks at what is printed"):
        read_tests(asked(f"shown = {looks}\nassert f(shown) == 1"))
    read_tests(asked(f"shown = {looks.replace('print', 'x').replace('stdout', 'y')}\nassert f(shown) == 1"))


@pytest.mark.parametrize(("result", "checks"), [(2, 1), (3, 0)])
def test_an_if_that_did_not_raise_counts_as_a_check_that_held(result, checks):
    held = []
    names = {"f": lambda _: result, "__checked__": lambda: held.append(1)}
    with suppress(AssertionError):
        exec(compile(counted("if f(1) != 2:\n    raise AssertionError"), "<test>", "exec"), names)
    assert len(held) == checks
