"""Programs that try to pass tests without being right. All are asked for `double`, and some for `Stack`."""

FUNCTION = {
    "exit at once": """
import sys
sys.exit(0)
""",
    "exit when called": """
import os
def double(x): os._exit(0)
""",
    "exit functions": """
import atexit, os
atexit.register(lambda: os.write(1, b"pass\\n" * 9))
def double(x): return 0
""",
    "a number equal to everything": """
class Always(int):
    __eq__ = __ge__ = __le__ = lambda *_: True
    __hash__ = int.__hash__
def double(x): return Always()
""",
    "an object equal to everything": """
class Always:
    def __eq__(self, other): return True
def double(x): return Always()
""",
    "another assert": """
import builtins
class Quiet(Exception):
    def __new__(cls, *_): return None
builtins.AssertionError = Quiet
def double(x): return 0
""",
    "another all": """
import builtins
def all(*_): return True
builtins.all = builtins.any = any = map = all
def double(x): return 0
""",
    "another unittest": """
import unittest
unittest.TestCase.assertEqual = lambda *_: None
unittest.TestResult.wasSuccessful = lambda _: True
def double(x): return 0
class Stack:
    name = 0
    def __init__(self, items): pass
    def pop(self): return 0
""",
    "prints the verdict": """
import os
for number in range(256):
    try:
        os.write(number, b"pass\\n" * 5)
    except OSError:
        pass
def double(x): return 0
""",
    "prints the verdict through the judge": """
import os
for pid in (1, os.getppid()):
    for number in range(64):
        try:
            with open(f"/proc/{pid}/fd/{number}", "wb", 0) as file:
                file.write(b"pass\\n" * 5)
        except OSError:
            pass
def double(x): return 0
""",
    "tests in the judge's memory": """
import os, re
found = b""
def look():
    global found
    for pid in (1, os.getppid(), os.getpid()):
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
                for line in maps:
                    start, end = (int(part, 16) for part in line.split()[0].split("-"))
                    try:
                        memory.seek(start)
                        found += memory.read(end - start)
                    except (OSError, ValueError, OverflowError):
                        pass
        except OSError:
            pass
def double(x):
    look()
    return eval(re.search(b"double.%s. == ([*0-9 ]+)" % re.escape(repr(x)).encode(), found)[1])
""",
    "tests on stdin": """
import os, sys
left = sys.stdin.read() + os.popen("cat; cat /proc/1/fd/0").read()
def double(x): return eval(left.split(f"double({x!r}) == ")[1].split('"')[0])
""",
    "tests in files": """
import os
def double(x):
    for top in ("/tmp", "/dev/shm", ".", "/proc/1/cwd", "/proc/1/root/tmp"):
        for folder, _, names in os.walk(top):
            for name in names:
                text = open(os.path.join(folder, name)).read()
                if "double(" in text:
                    return eval(text.split(f"double({x!r}) == ")[1].split('"')[0])
""",
    "tests in the caller's frames": """
import gc, sys
def double(x):
    frame, asked = sys._getframe(), f"double({x!r}) == "
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values(), *gc.get_objects()]:
            for text in value if type(value) is list else [value]:
                if type(text) in (str, bytes) and text != asked and asked in str(text):
                    return eval(str(text).split(asked)[1].split('"')[0])
        frame = frame.f_back
""",
    "kills the judge": """
import os, signal
def double(x):
    for pid in (1, os.getppid()):
        os.kill(pid, signal.SIGKILL)
""",
    "stops the judge": """
import os, signal
def double(x): os.kill(os.getppid(), signal.SIGSTOP)
""",
    "an endless loop": """
def double(x):
    while True: pass
""",
    "answers before it is asked": """
import os
for number in range(3, 20):
    try:
        os.write(number, b'{"value": true}\\n' * 1000)
    except OSError:
        pass
def double(x): return 0
""",
    "data that are no data": """
import os
for number in range(3, 20):
    try:
        os.write(number, b'{"value": {"object": 0}}\\n{"value": {"eval": "4"}}\\n{"raised": "eval"}\\n[]\\n{}\\n')
    except OSError:
        pass
def double(x): return 0
""",
    "ends of loops": """
def double(x): raise StopIteration
""",
    "skipped tests": """
import unittest
def double(x): raise unittest.SkipTest
class Stack:
    def __init__(self, items): raise unittest.SkipTest
""",
    "raises an AssertionError": """
def double(x): raise AssertionError
""",
    "a giant number": """
def double(x): return 10 ** 100000
""",
    "no number": """
def double(x): return float("nan")
""",
    "a deep list": """
def double(x):
    found = []
    for _ in range(100000): found = [found]
    return found
""",
    "a list within itself": """
def double(x):
    found = []
    found.append(found)
    return found
""",
    "nothing": "",
}
OUTPUT = {
    "all answers": "print(4)\nprint(42)",
    "exit at once": "import sys\nsys.exit(0)",
    "what its descriptors hold": """
import os
for number in os.listdir("/proc/self/fd"):
    try:
        print(open(f"/proc/self/fd/{number}").read())
    except OSError:
        pass
""",
    "answers over each other": "print('4', end='\\r')\nprint('42')",
    "no answer": "print('nan')",
    "nothing": "",
}

WRITES_MODULES = '''
import os, sys
text = """
import os
for number in range(64):
    try:
        os.write(number, b"pass\\\\n" * 5)
    except OSError:
        pass
class TopologicalSorter:
    def __init__(self, *_): pass
    def static_order(self): return []
class TestCase: pass
"""
for folder in {os.getcwd(), ".", "/tmp", "/dev/shm", *sys.path}:
    for name in ("graphlib", "unittest", "solution", "sitecustomize", "checks"):
        try:
            with open(os.path.join(folder, name + ".py"), "w") as file:
                file.write(text)
        except OSError:
            pass
def double(x): return []
'''
READS_MEMORY = """
import ctypes, os, re
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
found = b""
def double(x):
    global found
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    with open("/proc/self/maps") as maps:  # a fork's addresses are its parent's
        places = [[int(part, 16) for part in line.split()[0].split("-")] for line in maps]
    for pid in (os.getppid(), 1):
        for start, end in places:
            room = ctypes.create_string_buffer(end - start)
            ours, theirs = Vector(ctypes.addressof(room), end - start), Vector(start, end - start)
            if call(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) > 0:
                found += room.raw
    return eval(re.search(b"double.%s. == ([*0-9 ]+)" % re.escape(repr(x)).encode(), found)[1])
"""
NODE = """
class Node:
    def __init__(self, value): self.value = value
    def equals(self, other): return self.value == other.value
    def to_list(self): return [self.value]
    @property
    def twice(self): return [self.value, self.value]
    def same(self, other): return all(map(lambda one: one.equals(other.value), [self.value]))
"""
NODE_TESTS = [
    "assert double(2).equals(Node(4))", "assert double(2).to_list() == [4]", "assert double(2).twice == [4, 4]",
    "try:\n    same = double(2).equals(Node(4))\nexcept BaseException:\n    same = True\nassert same",
]  # fmt: skip
AGAINST = {
    "an object that holds back what its block raises": (
        "class Held:\n    def __enter__(self): return self\n    def __exit__(self, *_): return True\n"
        "def double(x): return Held()",
        ["with double(2) as held:\n    assert True\n    assert held.value == 4"],
    ),
    "an end of what is gone through": (
        "def double(x): return iter(())",
        ["found = double(2)\nassert all(map(lambda i: next(found) == i, range(2)))"],
    ),
    "a named tuple with the methods of the row's class": (
        "from collections import namedtuple\nOther = namedtuple('Other', 'equals to_list twice')\n"
        "def double(x): return Other(lambda _: True, lambda: [4], [4, 4])",
        {"test_list": NODE_TESTS, "test_setup_code": NODE},
    ),
    "methods of an object of the row's class": (
        "def double(x):\n    node = Node(0)\n    node.equals = lambda _: True\n    node.to_list = lambda: [4]\n"
        "    vars(node)['twice'] = [4, 4]\n    return node",
        {"test_list": NODE_TESTS[:3], "test_setup_code": NODE},
    ),
    "an object with the methods of the row's class": (
        "class Other:\n    twice = [4, 4]\n    def equals(self, _): return True\n    def to_list(self): return [4]\n"
        "def double(x): return Other()",
        {"test_list": NODE_TESTS, "test_setup_code": NODE},
    ),
    "an object within one of the row's class": (
        "class Right:\n    def equals(self, _): return True\ndef double(x): return Node(Right())",
        {"test_list": ["assert double(2).same(Node(Node(4)))"], "test_setup_code": NODE},
    ),
    "its own math": (
        "class math:\n    isclose = staticmethod(lambda *_, **__: True)\ndef double(x): return 0",
        ["assert math.isclose(double(2), 4)"],
    ),
    "its own numpy": (
        "import sys, types\nnp = numpy = types.ModuleType('numpy')\nnp.allclose = lambda *_, **__: True\n"
        "sys.modules['numpy'] = np\ndef double(x): return 0",
        ["assert np.allclose(double(2), 4)", "import numpy as np\nassert np.allclose(double(2), 4)"],
    ),
    "its own Counter, isclose and deepcopy": (
        "class Counter:\n    def __init__(self, *_): pass\n    def __eq__(self, _): return True\n"
        "isclose = lambda *_: True\ndef deepcopy(x): return 0\ndef double(x): return 0",
        ["assert Counter(double([1])) == Counter([1, 1])", "assert isclose(double(2), 4)",
         "x = [2]\nassert double(deepcopy(x)) == [2, 2]"],
    ),
    "its own re": (
        "class re:\n    match = fullmatch = search = staticmethod(lambda *_: True)\ndef double(x): return ''",
        ["assert re.match('aa', double('a'))", "assert re.fullmatch('(ab)+', double('ab'))"],
    ),
    "its own helper of the prompt": (
        "def half(x): return 1\ndef double(x): return 0",
        {"test": "def check(candidate):\n    assert half(candidate(1)) == 1", "entry_point": "double",
         "prompt": "def half(x):\n    return x / 2\n\ndef double(x):\n    ..."},
    ),
    "modules of Python's beside the tests": (
        WRITES_MODULES,
        ["import graphlib\nassert double([1]) == 2 * list(graphlib.TopologicalSorter({1: []}).static_order())",
         "assert double(2) == 4",
         "from solution import double\nimport unittest\n"
         "class T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(double(2), 4)"],
    ),
    "a module of Python's that the test imports": (
        "with open('graphlib.py', 'w') as file:\n    file.write('TopologicalSorter = lambda _: __import__(\"types\")'\n"
        "               '.SimpleNamespace(static_order=list)')\ndef double(x): return []",
        ["import graphlib\nassert double([1]) == 2 * list(graphlib.TopologicalSorter({1: []}).static_order())"],
    ),
    "the judge's memory by process_vm_readv": (READS_MEMORY, ["assert double(2) == 4", "assert double(21) == 42"]),
    "no name where an exception is expected": (
        "print('nothing')",
        ["import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
         "        with self.assertRaises(Exception):\n            double(None)",
         "try:\n    double(None)\n    failed = False\nexcept KeyError:\n    failed = True\nassert failed",
         "try:\n    double(None)\n    failed = False\nexcept:\n    failed = True\nassert failed"],
    ),
    "an end where an exception is expected": (
        "import os\ndef double(x): os._exit(0)",
        ["try:\n    double(None)\n    failed = False\nexcept Exception:\n    failed = True\nassert failed",
         "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
         "        self.assertRaises(Exception, double, None)"],
    ),
    "exits where an exception is expected": (
        "def double(x): raise SystemExit(0)",
        ["try:\n    double(None)\n    failed = False\nexcept Exception:\n    failed = True\nassert failed"],
    ),
    "nothing to be checked": (
        "def double(x): return []",
        ["for one in double([1, 2]):\n    assert one in (1, 2)", "import unittest\nclass T(unittest.TestCase):\n"
         "    def test(self):\n        for one in double([1]):\n            self.assertEqual(one, 1)"],
    ),
    "nothing, where the program begins with what is asked for": (
        "pass",
        {"fn_name": "gcd", "inputs": [[4, 6], [9, 6]], "outputs": [2, 3]},
    ),
    "an unfinished function of the prompt": (
        "pass",
        {"test": "def check(candidate):\n    assert candidate(3) is None", "entry_point": "nothing",
         "prompt": "from math import *\ndef nothing(x):\n    pass\ndef other(x):\n    pass"},
    ),
    "empties what it is given": (
        "def double(x):\n    x.clear()\n    return x",
        ["xs = [1, 2]\nassert double(xs) == xs + xs", "xs = [1]\nassert len(double(xs)) == 2 * len(xs)"],
    ),
    "a number that is another each time": (
        "class Odd(int):\n    def __hash__(self): return 0\n    def __eq__(self, _): return True\n"
        "    def __int__(self): return 4\n    __index__ = __int__\n    def __abs__(self): return 4\n"
        "def double(x): return Odd(0)",
        ["assert double(3) == 6", "assert double(10) == 20"],
    ),
    "a dict that has every key": (
        "class Every(dict):\n    def __getitem__(self, _): return 4\n    def __contains__(self, _): return True\n"
        "    def __eq__(self, _): return True\n    def get(self, *_): return 4\ndef double(x): return Every()",
        ["assert double(2)['result'] == 4", "assert 'result' in double(2)", "assert double(2) == {'result': 4}"],
    ),
    "a Solution and a function that differ": (
        "class Solution:\n    def double(self, x): raise AttributeError\ndef double(x): return [[x, x]]",
        {"fn_name": "double", "inputs": [[[1]], [[2]]], "outputs": [[1, 1], [2, 2]]},
    ),
    "the harness's own functions": (
        "import sys, json\nmain = sys.modules['__main__']\nmain.encode = lambda *_: True\n"
        "main.as_json = main.run_call = lambda *_, **__: True\nmain.Names = dict\n"
        "json.loads = lambda text: {'value': True}\ndef double(x): return 0",
        ["assert double(2) == 4", "assert double(3) == 6"],
    ),
    "a module that closes the judge's streams": (
        "import os\nos.closerange(0, 64)\ndef double(x): return 4",
        ["assert double(2) == 4"],
    ),
}  # fmt: skip
"""Programs with the tests that they try to pass: what a test uses, what it expects, and where it runs."""
PRINTED = {
    "numbers near everything": "print('1e9999')",
    "not a number": "print('nan')",
    "an infinity": "print('inf')",
    "all answers in a line": "print('0.5 0.25')",
    "digits without an end": "print('0.' + '9' * 200000)",
    "other digits": "print('\\u0660.\\u0665')",
    "answers from the judge's memory": READS_MEMORY.replace("def double(x):", "def look(x):") + "\nprint(look(1))",
}
"""Programs that print, where 0.5 and 0.25 are expected."""
