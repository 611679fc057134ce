"""What a test cannot do with a program in another process, as far as it is seen in the test's text."""

import ast
from collections.abc import Collection, Iterator

from slimrl.rewards.code_checks import Code, called, is_check, names_read

_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_PRINTED = ("redirect_stdout", "sys.stdout", "builtins.print")


def refuse_what_is_apart(test: Code, program: Collection[str]) -> None:
    """
    Args:
        program: the names that the program gives.

    Raises:
        ValueError: the test gives the program a function, or looks at what stays in the program's process: its own
            classes of exceptions, what it prints, and what it changes in an argument.
    """
    names = {*program, *_candidates(test)}
    functions = {node.name for node in test.nodes if isinstance(node, ast.FunctionDef)} - names
    for node in test.nodes:
        if isinstance(node, ast.Call) and _root(node) in names:
            given = [*node.args, *(one.value for one in node.keywords)]
            if any(isinstance(one, ast.Lambda) or (isinstance(one, ast.Name) and one.id in functions) for one in given):
                raise ValueError(f"line {node.lineno}: gives the program a function, which stays in the test's process")
        if isinstance(node, ast.Call | ast.ExceptHandler) and (asked := sorted({*_classes(node)} & {*program})):
            message = f"asks for the class {asked[0]}, which stays in the program's process"
            raise ValueError(f"line {node.lineno}: {message}")
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant) and _said(node).endswith(_PRINTED):
            raise ValueError(f"line {node.lineno}: looks at what is printed, which stays in the program's process")
    for place, name in _changed(test, names):
        raise ValueError(f"line {place}: {name} may be changed in place, which is not seen in the test's process")


def _said(node: ast.Name | ast.Attribute | ast.Constant) -> str:
    """A name, the last two of a path, or a text, which may name something too; empty for another value."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        return f"{name}.{node.attr}"
    return node.value if isinstance(node.value, str) else ""


def _candidates(test: Code) -> Iterator[str]:
    """Names that the tested function has within `check(candidate)`."""
    for node in test.nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args:
            yield node.args.args[0].arg


def _root(node: ast.AST) -> str:
    """`Solution` of `Solution().add(1)`; empty for a call of what has no name."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _classes(node: ast.AST) -> list[str]:
    """Names of the classes that an `except`, a check that something is raised, or isinstance looks for."""
    if isinstance(node, ast.ExceptHandler):
        return names_read(node.type) if node.type else []
    name = called(node)
    if isinstance(node, ast.Call) and name in ("raises", "assertRaises", "assertRaisesRegex"):
        return names_read(node.args[0]) if node.args else []
    if isinstance(node, ast.Call) and name in ("isinstance", "issubclass", "assertIsInstance"):
        return names_read(node.args[1]) if len(node.args) > 1 else []
    return []


def _changed(test: Code, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Lists and the like that are given to a call without a use of its result, and checked thereafter."""
    made = {
        target.id
        for node in test.nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, _DISPLAYS)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if not made:
        return
    checked = [
        (node.lineno, {*names_read(node)}) for node in test.nodes if isinstance(node, ast.stmt) and is_check(node)
    ]
    for node in test.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _root(node.value) in names:
            given = {one.id for one in node.value.args if isinstance(one, ast.Name)} & made
            later = set().union(*(read for line, read in checked if line > node.lineno))
            yield from ((node.lineno, name) for name in sorted(given & later))
