"""Import paths of a recipe, `module:function`, looked up in the source of their modules without running it.

A path is accepted if the source cannot decide: the module has no Python source, or makes names when it runs.
"""

import ast
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.config.import_path import hidden_file, hidden_text, near_module
from slimrl.config.keys import NAME, schema_key
from slimrl.config.load import is_needed
from slimrl.config.problems import Violation, suggestion, syntax_text
from slimrl.config.reward_rules import reward_parts
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.types import MODULE_FUNCTION
from slimrl.config.signatures import NOT_CALLABLE, called_wrongly, is_judged, other_order, tool_problems

NO_CLASS = {
    **dict.fromkeys(("agent.tools", f"agent.subagents.{NAME}.tools"), "A tool is a function."),
    "agent.episode": "An episode is an asynchronous function.",
    "agent.compaction.function": "A rule is a function.",
    "agent.function": "An agent is a function.",
    "reward.group_filters": "A filter is a function, or an object that can be called.",
    "algorithm.loss": "A loss is a function, or an object that can be called.",
    "algorithm.advantage": "An advantage is a function, or an object that can be called.",
}


FILE_END = ".py"
TOOLS = ("agent.tools", f"agent.subagents.{NAME}.tools")
CALLED_WITH = {
    **dict.fromkeys(
        ("reward.function", f"reward.parts.{NAME}.function", f"reward.by_name.{NAME}.function"),
        ("trajectory", "prompt"),
    ),
    **dict.fromkeys((f"reward.parts.{NAME}.args.of", f"reward.by_name.{NAME}.args.of"), ("trajectory", "prompt")),
    f"reward.group.{NAME}.function": ("trajectories", "prompt"),
    "reward.group_filters": ("trajectories",),
    "agent.episode": ("episode",),
    "agent.function": ("line", "connection"),
    "agent.compaction.function": ("messages",),
    "algorithm.loss": ("tokens", "settings", "log_ratio_N"),
    "algorithm.advantage": ("group",),
}
"""Setting -> arguments by place with which the run calls its function"""
CALLED = "A reward is a function, an object that can be called, or a class of such objects."


def function_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Functions that their modules do not define, classes in place of functions, and modules that are not Python."""
    for key, path, module, name in _import_paths(recipe, command):
        if module.endswith(FILE_END):
            yield key, f"{path}: a module is named without {FILE_END}. Use {module.removesuffix(FILE_END)}:{name}."
            continue
        folder_or_file = _find(module)
        if folder_or_file is None and (module + ".").startswith("slimrl."):
            # Another machine may have modules of others that this one has not.
            yield key, f"{path}: no module {module}."
            continue
        try:
            own = hidden_file(module, folder_or_file)
            if own and name in (_defined_names(own) or ()):
                yield key, f"{path}: {hidden_text(own)}"
                continue
            names = _defined_names(folder_or_file) if folder_or_file else None
        except SyntaxError as error:
            yield key, f"{path}: {syntax_text(error)}"
            continue
        if names is None:
            continue
        if name not in names:
            public = [other for other in names if not other.startswith("_")]
            yield key, f"{path}: {module} has no {name}." + suggestion(name, public)
        elif schema_key(key) in NO_CLASS and isinstance(names[name], ast.ClassDef):
            yield key, f"{path}: {name} is a class. {NO_CLASS[schema_key(key)]}"
        elif key not in NO_CLASS and key.endswith((".function", ".of")) and _cannot_be_called(names[name]):
            yield key, f"{path}: {name} is a class without __call__. {CALLED}"
        elif type(names[name]) in NOT_CALLABLE:
            yield key, f"{path}: {name} is {NOT_CALLABLE[type(names[name])]}, not a function."
        else:
            fields = partial(_fields, names) if (module + ".").startswith("slimrl.") else None
            yield from ((key, f"{path}: {problem}") for problem in _wrong_signature(recipe, key, names[name], fields))
    yield from _tools_given_twice(recipe, command)


def _wrong_signature(
    recipe: Recipe, key: str, node: ast.AST, fields: Callable[[str], Collection[str]] | None
) -> Iterator[str]:
    """What is wrong with a function that the run would call in vain; `fields` as of `called_wrongly`."""
    if schema_key(key) in TOOLS:
        yield from tool_problems(node, recipe.agent.tool_args)
        return
    given = {f"{section}.function": part.args for section, part in reward_parts(recipe.reward)}
    given |= {key: arguments for key, _, arguments in _verifiers(recipe)}
    places = CALLED_WITH.get(schema_key(key))
    if places is not None and (problem := called_wrongly(node, places, given.get(key, {}), fields)):
        yield problem
    if key == "agent.episode" and is_judged(node) and not isinstance(node, ast.AsyncFunctionDef):
        yield "is not `async def`, which an episode is."


def _tools_given_twice(recipe: Recipe, command: str) -> Iterator[Violation]:
    """The model could not tell them apart."""
    if not is_needed("agent.tools", command):
        return
    agent = recipe.agent
    given = {
        "agent.tools": agent.tools,
        **{f"agent.subagents.{name}.tools": one.tools for name, one in agent.subagents.items()},
    }
    for key, paths in given.items():
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            yield key, f"{path}: is given twice."


def absent_modules(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Modules that are not on this machine."""
    for key, path, module, _ in _import_paths(recipe, command):
        if _find(module) is None and not module.endswith(FILE_END):
            yield key, f"{path}: no module {module}.{near_module(module)}"


def reward_warnings(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Rewards that can be called, but whose parameters are named as if they got other values."""
    for key, path, module, name in _import_paths(recipe, command):
        places = CALLED_WITH.get(schema_key(key), ())
        file = _find(module) if places[1:] == ("prompt",) else None
        try:
            names = (_defined_names(file) or {}) if file else {}
        except SyntaxError:
            continue  # which function_violations refuses
        if name in names and (given := other_order(names[name])):
            yield key, f"{path}: its parameters are ({given}), but it is called with ({', '.join(places)})."


def _import_paths(recipe: Recipe, command: str) -> Iterator[tuple[str, str, str, str]]:
    """Key, import path, module and name of each function that the recipe names and the command needs."""
    paths = {
        "agent.tools": recipe.agent.tools,
        **{f"agent.subagents.{name}.tools": subagent.tools for name, subagent in recipe.agent.subagents.items()},
        "agent.environment": [recipe.agent.environment],
        **{f"agent.players.{name}.function": [player.function] for name, player in recipe.agent.players.items()},
        "agent.episode": [recipe.agent.episode],
        "agent.function": [recipe.agent.function],
        "agent.command_task": [recipe.agent.command_task],
        "agent.parser": [recipe.agent.parser],
        "agent.compaction.function": [recipe.agent.compaction.function],
        "reward.function": [recipe.reward.function],
        **{f"{key}.function": [part.function] for key, part in reward_parts(recipe.reward)},
        **{key: [path] for key, path, _ in _verifiers(recipe)},
        "reward.retry_on": recipe.reward.retry_on,
        "algorithm.loss": [recipe.algorithm.loss],
        "algorithm.advantage": [recipe.algorithm.advantage],
        "reward.group_filters": recipe.reward.group_filters,
    }
    for key, given in paths.items():
        for path in given if is_needed(key, command) else ():
            if MODULE_FUNCTION.fullmatch(path):
                module, _, name = path.partition(":")
                yield key, path, module, name


def _verifiers(recipe: Recipe) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Key, import path and arguments of the rewards that slimrl's shaping rewards contain (`of` and `of_args`)."""
    for section, part in reward_parts(recipe.reward):
        path, arguments = part.args.get("of"), part.args.get("of_args")
        if part.function.startswith("slimrl.rewards.") and isinstance(path, str):
            yield f"{section}.args.of", path, arguments if isinstance(arguments, dict) else {}


def _cannot_be_called(node: ast.AST) -> bool:
    """Whether a class has no __call__, nor a base that may have it."""
    if not isinstance(node, ast.ClassDef) or node.bases:
        return False
    return "__call__" not in dict(_names(node.body))


def _find(module: str) -> Path | None:
    """The file of a module, compiled ones included, or the folder of a package without a file."""
    first, *others = module.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = Path(spec.origin) if spec.has_location and spec.origin else next(iter(folders), Path(first))
    for name in others:
        files = (*(f / name / "__init__.py" for f in folders), *(f / f"{name}.py" for f in folders))
        compiled = (file for f in folders for file in f.glob(f"{name}.*.so"))
        packages = [f / name for f in folders if (f / name).is_dir()]
        known = [*(file for file in files if file.is_file()), *compiled, *packages]
        if not known:
            return None
        found, folders = known[0], packages
    return found


def _defined_names(file: Path) -> dict[str, ast.AST] | None:
    """Names at the top level of a module -> their last definition; None if the source does not tell all of them.

    Raises:
        SyntaxError: the source is not Python.
    """
    if file.suffix != ".py":
        return None
    module = ast.parse(file.read_bytes(), str(file))
    called = {
        node.func.id for node in ast.walk(module) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    every = list(_names(module.body))
    names = dict(every)
    declared = {name for node in ast.walk(module) if isinstance(node, ast.Global) for name in node.names}
    for name, count in Counter(name for name, _ in every).items():
        # Which value it has, is known when the module runs.
        if isinstance(names[name], ast.expr) and (count > 1 or name in declared):
            names[name] = ast.Pass()
    return None if names.keys() & {"*", "__getattr__"} or called & {"globals", "vars", "setattr", "exec"} else names


def _fields(names: Mapping[str, ast.AST], name: str) -> set[str]:
    """The keys of a TypedDict that a module of slimrl defines or imports, those of its bases included."""
    node = names.get(name)
    if isinstance(node, ast.ImportFrom) and node.module:
        file = _find(node.module)
        return _fields((_defined_names(file) or {}) if file else {}, name)
    if not isinstance(node, ast.ClassDef):
        return set()
    of_bases = [_fields(names, base.id) for base in node.bases if isinstance(base, ast.Name) and base.id in names]
    return {name for name, _ in _names(node.body)}.union(*of_bases)


def _names(body: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                yield node.id, node
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            yield from _names([node.value])
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield from _names([node.value])
            yield node.target.id, node.value
        else:
            yield from _names(ast.iter_child_nodes(node))
