"""The reference page of all settings, made of the schema: its types, its defaults, and its docstrings."""

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_type_hints

from omegaconf import MISSING

from slimrl.config import schema
from slimrl.config.schema import Recipe

HEADER = r"""# Settings

Every setting of a recipe, as `slimrl config schema` prints it from `slimrl/config/schema.py`, where the defaults stand.
`slimrl config show RECIPE` prints what they become in a recipe, and where each value came from.

- A setting without a default must be given, by those commands that read it.
- `a.b.c=value` on the command line sets `c` of the section `a.b`.
- Such a value is YAML: `agent.tools=[a:f, b:g]`, `rollout.eval_sampling={temperature: 0.7, top_k: 20}`.
- `extends: FILE` or `extends: [FILE, ...]` takes over other files, relative to the one that says it.
- Later files win; sections merge, lists are replaced. A file that comes to extend itself is refused.
- `data.eval.NAME: null` leaves out an evaluation set of a file that is extended.
- `${run.name}` stands for another setting, `${oc.env:HOME}` for a variable of the environment.
- Where settings are written, what is read from a variable is not: the run folder's recipes, its provenance, wandb's
  config, the driver's log and messages about a recipe have the reference in its place. A secret belongs there, not on
  the command line. It still shows where the setting is used: a system prompt in samples, a path in an engine's log,
  the project's name in wandb's own file.
- A resumed run reads the variable again, and cannot tell that its value is another one now.
- `\${` writes `${` itself, as in `'Write \${x} once'`; within double quotes YAML wants `"\\${x}"`.
- Scalars follow YAML 1.2: `1e-6` is a number; `off`, `yes` and `1_000` are words, which no number or boolean takes.
- A path is taken as it is written: `~` and `$HOME` are refused, `${oc.env:HOME}` is filled in.
- `trainer.megatron` and `rollout.sglang` take the fields of the installed versions, checked by name and type.
"""

TABLE_HEAD = "\n| key | type | default | |\n|---|---|---|---|\n"


def reference_page() -> str:
    """Markdown: one table for each section, in the order of the schema, then the choices."""
    choices: dict[str, type[Enum]] = {}
    sections = [HEADER, *_section(Recipe(), "", choices)]
    sections.append("\n## Choices\n")
    for name, kind in sorted(choices.items()):
        said = _docstrings(kind)
        listed = "\n".join(f"| `{member.value}` | {said.get(member.name, '')} |" for member in kind)
        title = f"\n### {name}\n\n" + (f"{_own_docstring(kind)}\n\n" if _own_docstring(kind) else "")
        sections.append(f"{title}| value | |\n|---|---|\n{listed}\n")
    return "".join(sections)


def _section(defaults: Any, prefix: str, choices: dict[str, type[Enum]]) -> Iterator[str]:
    """The table of the settings of one dataclass, by an instance with their defaults, then its sections."""
    cls = type(defaults)
    hints, said = get_type_hints(cls), _docstrings(cls)
    rows, below = [], []
    for field in dataclasses.fields(cls):
        key = f"{prefix}.{field.name}".lstrip(".")
        kind, default = hints[field.name], getattr(defaults, field.name)
        if dataclasses.is_dataclass(kind):
            below.append((default, key))
            continue
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices[kind.__name__] = kind
        rows.append(
            f"| `{field.name}` | {_type_text(kind)} | {_default_text(default)} | {said.get(field.name, '')} |\n"
        )
    title = f"\n## {prefix}\n" if prefix else "\n## At the top\n"
    doc = _own_docstring(cls)
    if rows:
        yield title + (f"\n{doc}\n" if doc else "") + TABLE_HEAD + "".join(rows)
    for inner, key in below:
        yield from _section(inner, key, choices)


def _type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    text = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
    return "`" + text.replace("|", "\\|") + "`"


def _default_text(value: Any) -> str:
    if value == MISSING:
        return "must be given"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if value == "":
        return "empty"
    return f"`{json.dumps(value)}`" if value is None or isinstance(value, bool) else f"`{value}`"


def _own_docstring(cls: type) -> str:
    """What the class itself says; dataclasses and enumerations make up one where there is none."""
    node = _class_node(cls)
    return " ".join((ast.get_docstring(node) or "").split())


def _docstrings(cls: type) -> dict[str, str]:
    """Of each field or member, the string below it."""
    found: dict[str, str] = {}
    name = None
    for statement in _class_node(cls).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name is not None:
            found[name] = " ".join(str(statement.value.value).split()).replace("|", "\\|")
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]  # type: ignore[assignment]
        name = target.id if isinstance(target, ast.Name) else None
    return found


def _class_node(cls: type) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(schema))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
