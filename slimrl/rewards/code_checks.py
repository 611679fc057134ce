"""What a test in Python checks, and where its names come from.

This needs the standard library only, since the sandbox runs the file too, in the process that judges.

1. A check is an `assert` statement, an `if` that raises AssertionError, or a statement that calls something named
   `assert...` or `raises`, alone or in a `with`: unittest, numpy.testing, pytest.
2. It is reached if it stands outside of functions, in a function `test...`, in a class of tests, or in what these use.
   A test without a reached check is refused. One that is run counts the checks that hold (`counted`).
3. A name that a test uses and does not define is Python's own if Python has it, else the program's (`Sources`).
"""

import ast
import builtins
import importlib
import symtable
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

SOLUTION = "solution"
"""Name of the module that holds the policy's program."""
CHECKED = "__checked__"
"""Name of what a counted test calls after each check that held."""
PACKAGES = {"np": "numpy", "numpy": "numpy", "pytest": "pytest", "sympy": "sympy", "scipy": "scipy", "pd": "pandas"}
"""Modules outside of the standard library that tests name without importing them."""
HELPERS = {
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "copy": ("deepcopy",),
    "datetime": ("timedelta",),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "json": ("dumps", "loads"),
    "math": ("inf", "isclose", "isinf", "isnan", "nan", "pi"),
    "pytest": ("approx", "raises"),
    "typing": ("Any", "Dict", "List", "Optional", "Set", "Tuple", "Union"),
}
"""Names that tests use as helpers: Python's wherever the program has something else to give."""
AMBIGUOUS = ("collections", "math", "itertools", "functools", "heapq", "bisect", "copy", "statistics", "datetime")
"""Modules whose other names (gcd, product, mean) may be Python's or what the program is asked for."""
BEGUN = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""Modules of which programs that are called by name need not import `*`"""
STARRED = (*BEGUN, "cmath", "dataclasses", "decimal", "enum", "fractions", "os", "os.path", "time", "unittest")
"""Modules of which tests and their setup may import `*`"""
_IMPLICIT = {*dir(builtins), "__file__", "__annotations__"}

type Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Sources:
    """Origins of the names that a test uses and does not define."""

    python: dict[str, str]
    """Names of Python: name -> `module` or `module:attribute`."""
    program: frozenset[str]
    """Names that the policy's program has to define."""
    packages: frozenset[str]
    """Modules outside of the standard library that the test needs."""


class Code:
    """Python, read once. Raises ValueError for what is none."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, parsed(text)
        self.nodes = list(ast.walk(self.tree))
        self.read = {node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        self.modules = {name for node in self.nodes for name in _imported(node)}
        self.used, self.defined = _scope(text, self.nodes)


def check_test(test: Code, setup: Code) -> None:
    """
    Args:
        setup: what is run before the test.

    Raises:
        ValueError: nothing is checked by it, or it needs what the program's process cannot give.
    """
    for node in test.nodes:
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            raise ValueError(f"line {node.lineno}: is asynchronous, and coroutines stay in the program's process")
    _refuse_arguments(test)
    if not any(is_check(node) for root in _reached([setup, test]) for node in ast.walk(root)):
        raise ValueError(_why_unchecked(test.tree))


def parsed(text: str) -> ast.Module:
    """Raises ValueError for what is no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "<test>", "exec", dont_inherit=True)  # finds what the parser lets pass, and runs nothing
            return ast.parse(text)
    except SyntaxError as error:
        hint = "; a doctest has to be written with assert" if text.lstrip().startswith(">>>") else ""
        raise ValueError(f"line {error.lineno}: is no Python: {error.msg}{hint}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is no Python: {error}") from error


def sources(tests: Sequence[Code], setup: Code, entry: str = "") -> Sources:
    """Find where the names of tests come from.

    Args:
        tests: all of one program.
        setup: what is run before each.
        entry: the name of the program that is tested; empty if the tests name it themselves.

    Raises:
        ValueError: it cannot be told which of the names are the program's.
    """
    codes = [setup, *tests]
    unknown = set().union(*(code.used - code.defined for code in codes)) - setup.defined - _IMPLICIT
    owners = {name for code in codes for node in code.nodes if (name := _attribute_owner(node))}
    imported = set().union(*(code.modules for code in codes))
    modules = {name for name in (unknown & owners) - {entry} if _is_module(name)}
    rest = unknown - modules - {entry}
    python = {name: PACKAGES.get(name, name) for name in modules}
    helpers = {name: f"{module}:{name}" for module, names in HELPERS.items() for name in names if name in rest}
    ambiguous = {name: f"{module}:{name}" for name in rest - {*helpers} if (module := _ambiguous_module(name))}
    own = rest - {*helpers} - {*ambiguous}
    if entry:
        if own:
            raise ValueError(f"uses {_list(own)}, which neither the test nor Python has; define it in the test's setup")
        program = {entry}
    elif SOLUTION in imported:
        program = own | {name for test in tests for node in test.nodes for name in _imported_from_solution(node)}
    elif own:
        if ambiguous:
            raise ValueError(_unclear(ambiguous))
        program = own
    else:
        # Some tasks ask for a function that Python has too, such as gcd or sum.
        program = rest or _builtins_called(tests)
        if len(program) > 1:
            program = program.intersection(*(test.read for test in tests))
        if len(program) != 1:
            raise ValueError(_unclear(rest) if rest else "asks nothing of the program")
    python |= {name: source for name, source in (helpers | ambiguous).items() if name not in program}
    needed = {source.partition(":")[0].partition(".")[0] for source in python.values()} | imported
    return Sources(python, frozenset(program), frozenset(needed - sys.stdlib_module_names - {SOLUTION}))


def counted(text: str) -> ast.Module:
    """A test that calls CHECKED after each check that held, and does not begin a run of unittest or pytest itself."""
    tree = parsed(text)
    _Counted().generic_visit(tree)
    return ast.fix_missing_locations(tree)


class _Counted(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        if isinstance(node, ast.Expr) and _begins_a_run(node.value):
            return ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        if not is_check(node):
            return node
        call = ast.Expr(ast.Call(ast.Name(CHECKED, ast.Load()), [], []))
        return [node, ast.copy_location(call, node)]


def _begins_a_run(node: ast.expr) -> bool:
    """Whether it is `unittest.main()` or `pytest.main()`, or `sys.exit` of one."""
    if not isinstance(node, ast.Call):
        return False
    if called(node) == "exit":
        return any(map(_begins_a_run, node.args))
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return called(node) == "main" and isinstance(owner, ast.Name) and owner.id in ("unittest", "pytest")


def is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return _is_check_call(node.value)
    if isinstance(node, ast.With):
        return any(_is_check_call(item.context_expr) for item in node.items)
    if isinstance(node, ast.If):
        return _fails(node.body) or _fails(node.orelse)
    return isinstance(node, ast.Assert)


def _fails(branch: Sequence[ast.stmt]) -> bool:
    """Whether a branch ends with `raise AssertionError`."""
    match branch:
        case [*_, ast.Raise(exc=ast.Name(id=name) | ast.Call(func=ast.Name(id=name)))]:
            return name == "AssertionError"
    return False


def _is_check_call(node: ast.expr) -> bool:
    name = called(node)
    return name.lower().startswith("assert") or name == "raises"


def called(node: ast.AST) -> str:
    """The last part of the name that a call names; empty if it is none."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
    return ""


def _definitions(tree: ast.Module) -> list[Definition]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def is_unittest(node: ast.ClassDef) -> bool:
    return any("TestCase" in ast.unparse(base) for base in node.bases)


def _is_test(node: Definition) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith("test")
    return node.name.startswith("Test") or is_unittest(node)


def _reached(codes: Sequence[Code]) -> Iterator[ast.AST]:
    """Statements outside of definitions, tests, and the definitions that these use, directly or not."""
    known = {node.name: node for code in codes for node in _definitions(code.tree)}
    waiting: list[ast.AST] = [node for code in codes for node in code.tree.body if node not in known.values()]
    waiting += [known.pop(name) for name in [*known] if _is_test(known[name])]
    while waiting:
        yield (root := waiting.pop())
        waiting += [known.pop(name) for name in names_read(root) if name in known]


def names_read(root: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(root) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def _refuse_arguments(code: Code) -> None:
    """Raises ValueError for a test function that would be called with arguments."""
    for node in filter(_is_test, _definitions(code.tree)):
        if isinstance(node, ast.FunctionDef):
            tests = [(node, 0)] if node.name not in code.read else []
        else:
            inner = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test")]
            tests = [] if is_unittest(node) else [(one, 1) for one in inner]
        for test, bound in tests:
            arguments = test.args
            required = len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) - bound
            if required > 0 or None in arguments.kw_defaults:
                raise ValueError(
                    f"line {test.lineno}: {test.name} takes arguments; fixtures and parameters of pytest are not given"
                )


def _why_unchecked(tree: ast.Module) -> str:
    functions = [node for node in _definitions(tree) if any(map(is_check, ast.walk(node)))]
    if functions:
        names, lines = _list(node.name for node in functions), functions[0].lineno
        return f"line {lines}: {names} is never called, so nothing is checked; `entry_point` names what to call it with"
    if any(isinstance(node, ast.Expr) for node in tree.body):
        return f"line {tree.body[0].lineno}: has an expression and no assert, so nothing is checked"
    return "has no assert, so nothing is checked"


def _scope(text: str, nodes: Sequence[ast.AST]) -> tuple[set[str], set[str]]:
    """The names that code uses as global ones, and those that it defines."""
    used: set[str] = set()
    defined = {"__name__", *(name for node in nodes for name in _star_imported(node))}
    with warnings.catch_warnings(action="ignore"):
        top = symtable.symtable(text, "<test>", "exec")
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                if symbol.is_referenced():
                    used.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
    return used, defined


def _star_imported(node: ast.AST) -> Iterable[str]:
    if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*" or node.module == SOLUTION:
        return []
    if node.module not in STARRED:
        known = f"known are those of {_list({*STARRED, SOLUTION})}"
        raise ValueError(f"line {node.lineno}: import the names of {node.module} one by one; of `import *` {known}")
    return _public(node.module)


@cache
def _public(module: str) -> frozenset[str]:
    """The names that `from module import *` gives, of a module of STARRED: no label chooses what is imported."""
    loaded = importlib.import_module(module)
    return frozenset(getattr(loaded, "__all__", [name for name in vars(loaded) if not name.startswith("_")]))


def _imported_from_solution(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
        return [one.name for one in node.names if one.name != "*"]
    return []


def _imported(node: ast.AST) -> Iterable[str]:
    """The modules that a statement imports, without what follows a dot."""
    if isinstance(node, ast.Import):
        return [one.name.partition(".")[0] for one in node.names]
    return [node.module.partition(".")[0]] if isinstance(node, ast.ImportFrom) and node.module else []


def _builtins_called(tests: Sequence[Code]) -> set[str]:
    return {called(node) for test in tests for node in test.nodes if isinstance(node, ast.Call)} & {*dir(builtins)}


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names or name in PACKAGES


def _attribute_owner(node: ast.AST) -> str:
    """`math` of `math.pi`; empty for what is no attribute of a name."""
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""


def _ambiguous_module(name: str) -> str:
    """The module of AMBIGUOUS that has a name; empty if none has."""
    return next((module for module in AMBIGUOUS if name in _public(module)), "")


def _unclear(names: Iterable[str]) -> str:
    return (
        f"uses {_list(names)}, which Python has too; import what is meant to be Python's, "
        f"or what is the program's by `from {SOLUTION} import ...`"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
