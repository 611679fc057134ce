"""Tests of programs as data sets publish them: what a label or a key of the metadata may hold.

- `{"inputs": [...], "outputs": [...]}`: texts on stdin and the texts expected on stdout. With `fn_name`, arguments of a
  function and what it returns. APPS (arXiv:2105.09938) and TACO (arXiv:2312.14852), and verl's files of them.
- a list of `{"input", "output", "testtype"}`: the same, of LiveCodeBench (arXiv:2403.07974), where `testtype` is
  `stdin` or `functional`. The name of the function is the row's `metadata.func_name`.
- a text or a list of texts, each a test in Python: MBPP (arXiv:2108.07732), with the row's `test_imports` and
  `test_setup_code`; HumanEval (arXiv:2107.03374) and LeetCodeDataset (arXiv:2504.14655), whose `check(candidate)` is
  called with the row's `entry_point`, after the code of its `prompt`; unittest, and pytest without fixtures.
- a row of these as an object, and each of them as JSON text.

What stands next to the tests in a row is looked for in the object that holds them, then in the prompt's metadata.
"""

import ast
import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slimrl.base.strict_json import strict_json
from slimrl.data.prompt import Prompt
from slimrl.rewards.code_checks import BEGUN, Code, Sources, check_test, parsed, sources
from slimrl.rewards.code_refusals import refuse_what_is_apart

MAX_UNPACKED_BYTES = 256 * 1024**2
"""The most bytes of LiveCodeBench's compressed tests."""
PRELUDE = "".join(f"from {module} import *\nimport {module}\n" for module in BEGUN)
"""What programs that are called by name need not import: the begun programs of LeetCode, APPS and TACO count on it."""
NAMED = "give the bare name, such as `add` of `def add(a, b)`, also for a method of Solution"
_DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
_BEGINNING = (*_DEFINING, ast.Assign, ast.AnnAssign)
_TEXTS = ("test_list", "challenge_test_list")
_CASES = ("public_test_cases", "private_test_cases")
_KEYS = ("inputs", "input_output", "test", *_TEXTS, *_CASES)


@dataclass(frozen=True)
class Cases:
    """Texts on stdin with those expected on stdout."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Calls:
    """Calls of a function, or of a method of the class Solution."""

    function: str
    pairs: Sequence[tuple[list[Any], list[Any]]]
    """Arguments, and the results of which one is expected"""


@dataclass(frozen=True)
class Texts:
    """Tests that are Python code."""

    texts: Sequence[str]
    setup: str
    """Code that is run before each test"""
    before: str
    """Code whose names the program has from the start"""
    names: Sources
    """Origins of the names that the tests do not define"""


type Tests = Cases | Calls | Texts


def read_tests(prompt: Prompt, key: str = "") -> Tests:
    """Read the tests of a prompt.

    Args:
        key: of its metadata; empty for the label.

    Raises:
        ValueError: there are none, they are of no known form, or they would check nothing; names the place.
    """
    where, value = (f"metadata.{key}", prompt.metadata.get(key)) if key else ("label", prompt.label)
    last = prompt.messages[-1].get("content")
    return _read(where, value, {"prompt": last if isinstance(last, str) else "", **prompt.metadata})


def _read(where: str, value: Any, row: Mapping[str, Any]) -> Tests:
    value = _decoded(where, value)
    match value:
        case dict():
            return _of_object(where, value, {**row, **value})
        case [dict(), *_]:
            return _of_cases(where, value, row)
        case str() if value.strip():
            return _of_texts(where, [value], row)
        case [str(), *_]:
            return _of_texts(where, value, row)
    raise ValueError(f"{where}: has no tests: {_shown(value)}")


def _decoded(where: str, value: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    if not isinstance(value, str) or not value.strip():
        return value
    text = value if value.lstrip().startswith(("{", "[")) else _unpacked(where, value)
    return value if text is None else _json(where, text)


def _json(where: str, text: str) -> Any:
    try:
        return strict_json(text, finite=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: begins as JSON does and is none: {error}") from error


def _unpacked(where: str, text: str) -> str | None:
    """The JSON text in base64, zlib and a pickle of one text, as LiveCodeBench has it; None if it is none of that.

    The pickle is read, and not run."""
    try:
        data = base64.b64decode(text, validate=True)
        reader = zlib.decompressobj()
        unpacked = reader.decompress(data, MAX_UNPACKED_BYTES)
    except (ValueError, binascii.Error, zlib.error):
        return None
    if not reader.eof:
        raise ValueError(f"{where}: the compressed tests are not whole, or larger than {MAX_UNPACKED_BYTES} bytes")
    try:
        found = [argument for _, argument, _ in pickletools.genops(unpacked) if isinstance(argument, str)]
    except ValueError as error:
        raise ValueError(f"{where}: the compressed tests are no pickle: {error}") from error
    if len(found) != 1:
        raise ValueError(f"{where}: the compressed tests are no pickle of one text")
    return found[0]


def _of_object(where: str, value: dict[str, Any], row: Mapping[str, Any]) -> Tests:
    if "inputs" in value or "outputs" in value:
        return _of_pairs(where, value, _function(row))
    if "input_output" in value:
        return _read(f"{where}.input_output", value["input_output"], row)
    if "test" in value:
        return _of_texts(f"{where}.test", [value["test"]], row)
    if "test_list" in value:
        return _of_texts(where, [text for key in _TEXTS for text in _decoded(key, value.get(key) or [])], row)
    if any(key in value for key in _CASES):
        cases = [_decoded(f"{where}.{key}", value[key]) for key in _CASES if value.get(key)]
        return _of_cases(where, [one for part in cases for one in _as_list(where, part)], row)
    raise ValueError(f"{where}: has no tests; known keys are {', '.join(_KEYS)}, and it has {', '.join(value)}")


def _of_cases(where: str, cases: Sequence[Any], row: Mapping[str, Any]) -> Tests:
    """LiveCodeBench's list of cases."""
    kinds = set()
    for number, case in enumerate(cases):
        if not isinstance(case, dict) or not {"input", "output", "testtype"} <= case.keys():
            raise ValueError(f"{where}[{number}]: must be an object with input, output and testtype")
        kinds.add(str(case["testtype"]))
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise ValueError(f"{where}: testtype must be stdin in all cases, or functional: {_shown(sorted(kinds))}")
    function = ""
    if kinds == {"functional"}:
        inner = cases[0].get("metadata")
        function = _function({**row, **inner} if isinstance(inner, dict) else row)
        if not function:
            raise ValueError(f"{where}: functional tests need the function's name, metadata.func_name; {NAMED}")
    pairs = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    return _of_pairs(where, pairs, function)


def _function(row: Mapping[str, Any]) -> str:
    """The name of the function that is called; empty if there is none. LiveCodeBench has it in JSON."""
    inner = row.get("metadata")
    if isinstance(inner, str) and inner.lstrip().startswith("{"):
        inner = _json("metadata", inner)
    for given in (row, inner if isinstance(inner, dict) else {}):
        for key in ("fn_name", "func_name"):
            name = given.get(key)
            if name is not None and not (isinstance(name, str) and name.isidentifier()):
                raise ValueError(f"{key}: {_shown(name)} is no name of a function; {NAMED}")
            if name:
                return name
    return ""


def _of_pairs(where: str, value: Mapping[str, Any], function: str) -> Cases | Calls:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"{where}: inputs and outputs must be lists")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{where}: has {len(inputs)} inputs and {len(outputs)} outputs")
    if function:
        return Calls(function, _calls(where, inputs, outputs))
    try:
        texts = [_each(f"{where}.{key}", value[key], _lines) for key in ("inputs", "outputs")]
    except ValueError as error:
        raise ValueError(f"{error}. For calls of a function add its name, as fn_name; {NAMED}") from error
    if not any(text.strip() for text in texts[1]):
        raise ValueError(f"{where}: no output has any text, so a program that prints nothing would be right")
    return Cases(list(zip(*texts, strict=True)))


def _each[T](where: str, values: Sequence[Any], read: Callable[[str, Any], T]) -> list[T]:
    return [read(f"{where}[{number}]", value) for number, value in enumerate(values)]


def _lines(where: str, value: Any) -> str:
    """A text, which some data sets give as a list of its lines."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{where}: must be a text or a list of lines, not {_shown(value)}")
    return "\n".join(lines)


def _calls(where: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Arguments and expected results. LiveCodeBench and verl give them as JSON, an argument a line.

    APPS and TACO put most results into a list of one; where all are, a result counts with and without it.
    """
    in_json = isinstance(inputs[0], str)
    given = _each(f"{where}.inputs", inputs, _json_lines if in_json else _as_list)
    if in_json:
        outputs = _each(f"{where}.outputs", outputs, lambda at, text: _json(at, _lines(at, text)))
    wrapped = all(isinstance(one, list) and len(one) == 1 for one in outputs)
    return [
        (arguments, [expected, expected[0]] if wrapped else [expected])
        for arguments, expected in zip(given, outputs, strict=True)
    ]


def _json_lines(where: str, text: Any) -> list[Any]:
    return [_json(where, line) for line in _lines(where, text).split("\n") if line.strip()]


def _as_list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list, not {_shown(value)}")
    return value


def _of_texts(where: str, texts: Sequence[Any], row: Mapping[str, Any]) -> Texts:
    if not texts:
        raise ValueError(f"{where}: has no tests")
    imports = _each(
        "test_imports", _as_list("test_imports", _decoded("test_imports", row.get("test_imports") or [])), _lines
    )
    setup = "\n".join([*imports, _lines("test_setup_code", row.get("test_setup_code") or "")]).replace("\r\n", "\n")
    entry = row.get("entry_point") or ""
    if not isinstance(entry, str):
        raise ValueError(f"entry_point: must be a text, not {_shown(entry)}")
    before = _code(setup, _DEFINING) if "class " in setup else ""
    if entry:
        _check_entry(entry)
        prompt = _code(row["prompt"], _BEGINNING, without=_root(entry))
        before, setup = PRELUDE + prompt, f"{prompt}\n{setup}"
    try:
        begun = Code(setup)
    except ValueError as error:
        raise ValueError(f"the code before the tests: {error}") from error
    found: list[Code] = []
    for number, text in enumerate(texts):
        place = where if len(texts) == 1 else f"{where}[{number}]"
        if not isinstance(text, str):
            raise ValueError(f"{place}: must be a text, not {_shown(text)}")
        try:
            found.append(_test(text, entry))
            check_test(found[-1], begun)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    try:
        names = sources(found, begun, _root(entry))
        for test in found:
            refuse_what_is_apart(test, names.program)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Texts([test.text for test in found], setup.strip(), before, names)


def _test(text: str, entry: str) -> Code:
    """A test; one that defines `check(candidate)` and does not call it, with the call."""
    if entry and "check" in text:
        with suppress(ValueError):  # which the text alone raises too
            test = Code(f"{text}\n\ncheck({entry})\n")
            read = [node.id for node in test.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
            if "check" in test.defined and read.count("check") == 1 + (_root(entry) == "check"):
                return test
    return Code(text)


def _check_entry(entry: str) -> None:
    try:
        parsed(f"({entry})")
        known = _root(entry).isidentifier()
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"entry_point: {_shown(entry)} is no name in the program")


def _root(entry: str) -> str:
    """`Solution` of `Solution().twoSum`."""
    return entry.partition(".")[0].partition("(")[0].strip()


def _code(text: Any, kept: tuple[type[ast.stmt], ...], without: str = "") -> str:
    """The statements of these kinds in code, but for the definition of one name: the unfinished one that a prompt has.
    Empty for a text in words, as most prompts but HumanEval's are."""
    try:
        tree = parsed(text)
    except (ValueError, TypeError):
        return ""
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, kept) and not (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == without)
    ]
    try:
        return ast.unparse(tree)
    except RecursionError as error:
        raise ValueError("the code before the tests: is nested too deeply") from error


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
