"""The reference page of all settings, from the types, defaults and docstrings of the schema."""

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_type_hints

from slimrl.config.keys import NAME, named_type, type_text
from slimrl.config.megatron_verdicts import MEGATRON_VERDICTS
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.config.schema.types import MISSING
from slimrl.config.sglang_verdicts import SGLANG_VERDICTS
from slimrl.config.verdicts import Judgement, Verdict

HEADER = r"""# Settings

Every setting of a recipe, as `slimrl config schema` prints it from `slimrl/config/schema/`, which has the defaults.
`slimrl config show RECIPE` prints the value of each setting in a recipe, and where it was set.

- A setting without a default must be given for the commands that read it.
- `a.b.c=value` on the command line sets `c` of the section `a.b`.
- The value is YAML: `agent.tools=[a:f, b:g]`, `rollout.eval_sampling={temperature: 0.7, top_k: 20}`.
- `extends: FILE` or `extends: [FILE, ...]` inherits from other files, relative to the file with `extends`.
- Later files win; sections merge, lists are replaced. A cycle is refused.
- `data.eval.NAME: null` removes an inherited evaluation set; so does null in the other sections of `data`.
- `reward.parts.NAME: null` removes all of an inherited part; so does null for each other name that a recipe chooses.
- `${run.name}` refers to another setting, `${oc.env:HOME}` to an environment variable.
- The value of a variable is not written down: the run folder's recipes, its provenance, wandb's config, the driver's
  log and messages about a recipe show the reference instead. Put a secret into a variable, not on the command line.
  It still shows where the setting is used: a system prompt in samples, a path in an engine's log, the project's name
  in wandb's own file.
- A resumed run reads the variable again, and does not notice a changed value.
- `\${` writes `${` itself, as in `'Write \${x} once'`; within double quotes write `"\\${x}"`.
- Scalars follow YAML 1.2: `1e-6` is a number; `off`, `yes` and `1_000` are words, refused for a number or a boolean.
- A file has at most 5,000 values, counted as often as `*name` repeats them, 50 levels deep; numbers have 64 bits.
- Paths are not expanded: `~` and `$HOME` are refused, `${oc.env:HOME}` is replaced.
- `trainer.megatron`, `critic.trainer.megatron`, `rollout.sglang` and `teacher.sglang` take fields of the installed
  versions, checked by name and type: those [at the end](#fields-of-megatron-core-and-sglang).
- `trainer.env`, `critic.trainer.env`, `rollout.env` and `teacher.env` take variables by name. A process of the trainer
  gets them before it uses a GPU, but after its libraries are loaded: those that the loader or a library of threads
  reads then (`LD_PRELOAD`) are refused.
"""

FIELDS = """
## Fields of megatron-core and SGLang

What a recipe may set in `trainer.megatron`, `critic.trainer.megatron` and `rollout.sglang`. Every other field is
refused, and the message says why; `slimrl/config/megatron_verdicts.py` and `sglang_verdicts.py` have the reasons.
`teacher.sglang` takes those of `rollout.sglang` but for `speculative_*`, and those that lay out weights otherwise.
"""

TABLE_HEAD = "\n| key | type | default | |\n|---|---|---|---|\n"


def reference_page() -> str:
    """Markdown: one table per section in the order of the schema, then the choices."""
    choices: dict[str, type[Enum]] = {}
    sections = [HEADER, *_section(Recipe(), "", choices)]
    sections.append("\n## Choices\n")
    for name, kind in sorted(choices.items()):
        said = _docstrings(kind)
        listed = "\n".join(f"| `{member.value}` | {said.get(member.name, '')} |" for member in kind)
        title = f"\n### {name}\n\n" + (f"{_own_docstring(kind)}\n\n" if _own_docstring(kind) else "")
        sections.append(f"{title}| value | |\n|---|---|\n{listed}\n")
    return "".join([*sections, *_package_fields()])


def _package_fields() -> Iterator[str]:
    """The fields of other packages that a recipe may set, by what they are for."""
    yield FIELDS
    for section, verdicts in (("trainer.megatron", MEGATRON_VERDICTS), ("rollout.sglang", SGLANG_VERDICTS)):
        rows: dict[str, list[str]] = {}
        for name, judgement in verdicts.items():
            if judgement.verdict is Verdict.safe:
                rows.setdefault(_purpose(judgement), []).append(f"`{name}`")
        listed = "\n".join(f"| {', '.join(names)} | {purpose} |" for purpose, names in rows.items())
        yield f"\n### {section}\n\n| fields | |\n|---|---|\n{listed}\n"


def _purpose(judgement: Judgement) -> str:
    values = " or ".join(f"`{value}`" for value in judgement.values)
    conditions = (
        values,
        f"with `{judgement.needs}`" if judgement.needs else "",
        "with Transformer Engine, on a GPU" if judgement.transformer_engine else "",
    )
    return "; ".join(part for part in (judgement.reason, *conditions) if part)


def _section(defaults: Any, prefix: str, choices: dict[str, type[Enum]]) -> Iterator[str]:
    """The table of one dataclass, given an instance with its defaults, then those of its sections."""
    cls = type(defaults)
    hints, said = get_type_hints(cls), _docstrings(cls)
    rows, below = [], []
    for field in dataclasses.fields(cls):
        key = f"{prefix}.{field.name}".lstrip(".")
        kind, default = hints[field.name], getattr(defaults, field.name)
        if kind is TrainerConfig and key != "trainer":
            rows.append(f"| `{field.name}` | [trainer](#trainer) | those of `trainer` | {said[field.name]} |\n")
            continue
        if dataclasses.is_dataclass(kind):
            below.append((default, key))
            continue
        # Sections of one type, next to each other, share a table.
        if (named := named_type(kind)) is not None and named not in [type(inner) for inner, _ in below]:
            below.append((named(), f"{key}.{NAME}"))
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices[kind.__name__] = kind
        choices |= _linked_choices(cls, said.get(field.name, ""))
        rows.append(
            f"| `{field.name}` | {_type_text(kind)} | {_default_text(default)} | {said.get(field.name, '')} |\n"
        )
    title = f"\n## {prefix}\n" if prefix else "\n## At the top\n"
    doc = _own_docstring(cls)
    if rows:
        yield title + (f"\n{doc}\n" if doc else "") + TABLE_HEAD + "".join(rows)
    for inner, key in below:
        yield from _section(inner, key, choices)


def _linked_choices(cls: type, said: str) -> dict[str, type[Enum]]:
    """Enumerations of the dataclass's module to which a field's text links: the names that a text may have instead of
    an import path."""
    linked = set(re.findall(r"\]\(#(\w+)\)", said))
    return {
        name: kind
        for name, kind in vars(sys.modules[cls.__module__]).items()
        if name.lower() in linked and isinstance(kind, type) and issubclass(kind, Enum)
    }


def _type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if (named := named_type(kind)) is not None:
        return f"{named.__name__} by name"
    return "`" + type_text(kind).replace("|", "\\|") + "`"


def _default_text(value: Any) -> str:
    if value == MISSING:
        return "must be given"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if value == "":
        return "empty"
    return f"`{json.dumps(value)}`" if value is None or isinstance(value, bool) else f"`{value}`"


def _own_docstring(cls: type) -> str:
    """The docstring in the source; dataclasses and enumerations generate one if there is none."""
    return " ".join((ast.get_docstring(_class_node(cls)) or "").split())


def _docstrings(cls: type) -> dict[str, str]:
    """Field or member -> the string below it."""
    found: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, cls.__bases__):
        found |= _docstrings(base)
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
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
