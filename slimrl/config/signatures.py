"""What the source of a function says about calls of it, without running it.

A decorator may make another function of it, so a decorated one is not checked, but for those of KEEPING. A base class
may decide how objects are made, so a class that has one is not checked, but for slimrl's own.
"""

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CALLABLE: dict[type[ast.AST], str] = {
    ast.Constant: "a value",
    ast.JoinedStr: "a text",
    **dict.fromkeys((ast.List, ast.ListComp), "a list"),
    **dict.fromkeys((ast.Dict, ast.DictComp), "a dict"),
    **dict.fromkeys((ast.Set, ast.SetComp), "a set"),
    ast.Tuple: "a tuple",
}
"""Types of expressions whose value cannot be called, with the words for them"""
KEEPING = ("tool", "checked_by")
"""Decorators of slimrl that leave a function as it is"""
SUPPLIED = ("EpisodeInfo", "SandboxPool", "Supplies")
"""Annotations of parameters for which the run supplies the arguments"""
NOT_FIRST = ("prompt", "prompts", "args")
NOT_SECOND = ("trajectory", "trajectories", "sample", "samples", "completion", "completions", "response")
"""Names that a reward's first or second parameter has if it was written the other way round, or for another program,
as `(args, sample)` for slime and `(prompts, completions)` for TRL"""

_UNPACK = re.compile(r"Unpack\[(\w+)\]")
_KINDS = inspect._ParameterKind
_TAKES_SELF = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD, _KINDS.VAR_POSITIONAL)


def called_wrongly(
    node: ast.AST,
    places: Sequence[str],
    names: Mapping[str, Any],
    fields: Callable[[str], Collection[str]] | None = None,
) -> str | None:
    """Why what a name stands for cannot be called with these arguments by place and by name; None if it may be.

    A class is made with the names, and its objects are called with the places.

    Args:
        fields: for code of slimrl, whose base classes do not decide how objects are made: the keys of a TypedDict, of
            which `**settings: Unpack[...]` takes no others.
    """
    if isinstance(node, ast.ClassDef):
        return _class_called_wrongly(node, places, names, fields)
    parameters = _parameters(node)
    return None if parameters is None else _unbindable(parameters, places, names)


def _class_called_wrongly(
    node: ast.ClassDef,
    places: Sequence[str],
    names: Mapping[str, Any],
    fields: Callable[[str], Collection[str]] | None,
) -> str | None:
    if (node.bases and fields is None) or node.keywords or node.decorator_list:
        return None
    methods = {part.name: part for part in node.body if isinstance(part, FUNCTIONS)}
    for name, (by_place, by_name) in {"__init__": ((), names), "__call__": (places, {})}.items():
        parameters = _method_parameters(methods[name]) if name in methods else None
        if parameters is not None and not _is_static(methods[name]):
            if not parameters or parameters[0].kind not in _TAKES_SELF:
                return f"its {name} has no parameter self."
            if parameters[0].kind is not _KINDS.VAR_POSITIONAL:  # which takes the object and more
                parameters = parameters[1:]
        if parameters is not None and fields is not None:
            parameters = [*chain.from_iterable(_unpacked(each, fields) for each in parameters)]
        if parameters is not None and (problem := _unbindable(parameters, by_place, by_name)):
            return problem
    return None


def _unpacked(parameter: inspect.Parameter, fields: Callable[[str], Collection[str]]) -> list[inspect.Parameter]:
    """`**settings: Unpack[Settings]` as the parameters that it stands for; another parameter as it is."""
    found = _UNPACK.fullmatch(str(parameter.annotation))
    if parameter.kind is not _KINDS.VAR_KEYWORD or found is None:
        return [parameter]
    return [inspect.Parameter(name, _KINDS.KEYWORD_ONLY, default=None) for name in fields(found[1])]


def other_order(node: ast.AST) -> str | None:
    """The names of a reward's first two parameters, if they say that it expects other values than a trajectory and a
    prompt, or these the other way round; None else."""
    if isinstance(node, ast.ClassDef):
        calls = [part for part in node.body if isinstance(part, FUNCTIONS) and part.name == "__call__"]
        parameters = (_method_parameters(calls[0]) or []) if calls else []
        parameters = parameters if calls and _is_static(calls[0]) else parameters[1:]
    else:
        parameters = _parameters(node) or []
    names = [each.name for each in parameters if each.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)]
    wrong = any(name in others for name, others in zip(names, (NOT_FIRST, NOT_SECOND), strict=False))
    return ", ".join(names[:2]) if wrong else None


def tool_problems(node: ast.AST, fixed: Collection[str]) -> Iterator[str]:
    """What the model could not be told of a tool.

    Args:
        fixed: parameters that the recipe gives.
    """
    parameters = _parameters(node)
    if parameters is None or not isinstance(node, FUNCTIONS):
        return
    told = ast.get_docstring(node) or ""
    if not told:
        yield "has no docstring, from which the model is told what the tool does."
    described = []
    for each in parameters:
        if each.name in fixed or each.annotation in SUPPLIED:
            continue
        if each.kind in (_KINDS.VAR_POSITIONAL, _KINDS.VAR_KEYWORD):
            yield f"has the parameter {each}, which no schema can describe to the model."
        elif each.annotation is each.empty:
            yield f"its parameter {each.name} has no annotation, from which the model is told its type."
        else:
            described.append(each.name)
    if told:
        yield from docstring_problems(told, described)


def is_judged(node: ast.AST) -> bool:
    """Whether the source tells how a function is called."""
    return isinstance(node, FUNCTIONS) and all(map(_keeps, node.decorator_list))


def _keeps(decorator: ast.expr) -> bool:
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name.rpartition(".")[2] in KEEPING


def _parameters(node: ast.AST) -> list[inspect.Parameter] | None:
    """The parameters of a function or a lambda; None if the source does not tell them. Annotations are the last part of
    their text."""
    if not (isinstance(node, ast.Lambda) or is_judged(node)):
        return None
    return _of_arguments(node.args)  # type: ignore[attr-defined]


def _method_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[inspect.Parameter] | None:
    """The same of a method, which may be static or of its class."""
    known = all(_keeps(one) or ast.unparse(one) in ("staticmethod", "classmethod") for one in node.decorator_list)
    return _of_arguments(node.args) if known else None


def _is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)


def _of_arguments(given: ast.arguments) -> list[inspect.Parameter]:
    of_place = [*given.posonlyargs, *given.args]
    required = len(of_place) - len(given.defaults)
    found = [
        _parameter(
            each,
            _KINDS.POSITIONAL_ONLY if each in given.posonlyargs else _KINDS.POSITIONAL_OR_KEYWORD,
            number >= required,
        )
        for number, each in enumerate(of_place)
    ]
    found += [_parameter(given.vararg, _KINDS.VAR_POSITIONAL)] if given.vararg else []
    found += [
        _parameter(each, _KINDS.KEYWORD_ONLY, default is not None)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return found + ([_parameter(given.kwarg, _KINDS.VAR_KEYWORD)] if given.kwarg else [])


def _parameter(node: ast.arg, kind: Any, has_default: bool = False) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    text = empty if node.annotation is None else ast.unparse(node.annotation).strip("'\"").rpartition(".")[2]
    return inspect.Parameter(node.arg, kind, default=None if has_default else empty, annotation=text)


def _unbindable(parameters: Sequence[inspect.Parameter], places: Sequence[str], names: Mapping[str, Any]) -> str | None:
    supplied = {each.name for each in parameters if each.annotation in SUPPLIED}
    try:
        inspect.Signature(parameters).bind(*places, **{**dict.fromkeys(supplied), **names})
    except TypeError as error:
        said = ", ".join([*places, *(f"{name}=..." for name in names)])
        return f"cannot be called with ({said}): {error}."
    return None


_ARGS = re.compile(r"\n\s*Args:\n(.*?)(?=\n\s*(?:Returns:|Raises:)|\Z)", re.DOTALL)
_UNDERLINED = re.compile(
    r"^[ \t]*((?:Other )?Parameters|Returns|Yields|Receives|Raises)[ \t]*\n[ \t]*-{3,}[ \t]*$", re.MULTILINE
)
"""A section in NumPy's style"""


def docstring_problems(told: str, names: Sequence[str]) -> Iterator[str]:
    """
    Args:
        told: a docstring without its indentation.
        names: parameters that the model gives.
    """
    if underlined := _UNDERLINED.search(told):
        yield (
            f"its docstring has a section {underlined[1]} in NumPy's style, which the model would be told as "
            "words. Write the parameters below `Args:`, as `item: What it is.`"
        )
        return
    section = "".join(_ARGS.findall(told))
    for name in names:
        found = re.search(rf"^\s*{re.escape(name)}(?P<typed> *\(.*\) *| +)?:", section, re.MULTILINE)
        if found is None:
            yield f"its docstring does not describe {name} in a section `Args:`."
        elif found["typed"]:
            yield f"its docstring describes {name} with a type; write `{name}: What it is.` and annotate the type."
