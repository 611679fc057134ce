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
