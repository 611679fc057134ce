"""Fields of the installed megatron-core and SGLang with their types and choices.

They are read from the syntax tree of the packages' source, because importing either takes seconds and torch.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MEGATRON_SOURCES = {
    "ModelParallelConfig": "core/model_parallel_config.py",
    "TransformerConfig": "core/transformer/transformer_config.py",
    "MLATransformerConfig": "core/transformer/transformer_config.py",
    "OptimizerConfig": "core/optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "core/distributed/distributed_data_parallel_config.py",
}
"""Classes whose fields `trainer.megatron` may name -> their file in the package."""

MEGATRON_ENUMERATIONS = "core/transformer/enums.py"
"""File of the enumerations whose members a recipe writes by name."""

DTYPES = ("float32", "bfloat16", "float16", "uint8")
"""Words for a torch.dtype of megatron-core; uint8 stands for optimizer moments in FP8."""

_SCALARS = {"bool": bool, "int": int, "float": float, "str": str}
_CONTAINERS = {"list": list, "List": list, "tuple": list, "Tuple": list, "dict": dict, "Dict": dict}


@dataclass(frozen=True, kw_only=True)
class FieldType:
    """The values that a field accepts from YAML."""

    types: frozenset[type]
    """Plain Python types of the accepted values; `float` accepts an int too."""
    choices: tuple[Any, ...]
    text: str
    """The field's type annotation as the package writes it."""
    unchecked: bool = False
    """Whether the annotation names a type of the package, whose constructor checks the value."""
    words: tuple[Any, ...] = ()
    """Values that the package's own command line accepts, for each element of a list; empty for any."""

    def accepts(self, value: Any) -> bool:
        if self.unchecked or (value is not None and value in self.choices):
            return True
        if isinstance(value, bool):
            return bool in self.types
        return type(value) in self.types or (isinstance(value, int) and float in self.types)

    def unknown(self, value: Any) -> list[Any]:
        """Elements of a value of the right type that are not among the words."""
        values = value if isinstance(value, list) else [value]
        return [item for item in values if self.words and item is not None and item not in self.words]


class PackageFields(Mapping[str, FieldType]):
    """Name -> type of the fields of a package. A type is read when it is asked for: recipes name few of a thousand."""

    def __init__(self, annotations: Mapping[str, ast.expr], constants: Mapping[str, tuple[Any, ...]]) -> None:
        """
        Args:
            annotations: each field's, as the package writes it.
            constants: name that an annotation may use -> the values for which it stands.
        """
        self._annotations = annotations
        self._constants = constants

    def __getitem__(self, name: str) -> FieldType:
        return _field_type(self._annotations[name], self._constants)

    def __iter__(self) -> Iterator[str]:
        return iter(self._annotations)

    def __len__(self) -> int:
        return len(self._annotations)


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{name} is not installed, so its settings cannot be checked")
    return Path(next(iter(spec.submodule_search_locations)))


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    """Members of a union, of Optional and of Annotated, recursively."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Optional":
            yield ast.Constant(value=None)
        if node.value.id in ("Optional", "A", "Annotated"):
            yield from _alternatives(parts[0])
        elif node.value.id == "Union":
            for part in parts:
                yield from _alternatives(part)
        else:
            yield node
    else:
        yield node


def _field_type(annotation: ast.expr, constants: Mapping[str, tuple[Any, ...]]) -> FieldType:
    types: set[type] = set()
    choices: list[Any] = []
    unchecked = False
    members = list(_alternatives(annotation))
    for member in members:
        name = member.value if isinstance(member, ast.Subscript) else member
        label = ast.unparse(name)
        if isinstance(member, ast.Constant) and member.value is None:
            types.add(type(None))
        elif label in _SCALARS:
            types.add(_SCALARS[label])
        elif label in _CONTAINERS:
            types.add(_CONTAINERS[label])
        elif label == "Literal" and isinstance(member, ast.Subscript):
            parts = member.slice.elts if isinstance(member.slice, ast.Tuple) else [member.slice]
            choices += [ast.literal_eval(part) for part in parts]
        elif label == "torch.dtype":
            choices += DTYPES
        elif label in constants:
            choices += constants[label]
        elif label not in ("Callable", "ContextManager"):
            unchecked = True
    text = " | ".join(ast.unparse(member) for member in members)
    return FieldType(
        types=frozenset(types),
        choices=tuple(choices),
        text=text,
        unchecked=unchecked,
        words=_words(annotation, constants),
    )


def _words(annotation: ast.expr, constants: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """`choices` of the `Arg(...)` in an Annotated, unless they are computed or a `type_parser` precedes them."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Arg":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "choices" in given and "type_parser" not in given:
                return _constant(given["choices"], constants)
    return ()


def _constant(node: ast.expr, constants: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """A literal list, or a named one; empty for a computed value."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, ())
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else ()


def _named_lists(path: Path) -> dict[str, tuple[Any, ...]]:
    """Name -> list of constants, as a module defines them."""
    assigned = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    return {ast.unparse(node.targets[0]): _constant(node.value, {}) for node in assigned}


def _enumerations(path: Path) -> dict[str, tuple[str, ...]]:
    """Name -> members of each enumeration that a module defines."""
    return {
        node.name: tuple(ast.unparse(item.targets[0]) for item in node.body if isinstance(item, ast.Assign))
        for node in _classes(path)
        if any(ast.unparse(base).rpartition(".")[2] == "Enum" for base in node.bases)
    }


def _annotations(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Name -> annotation of the fields of a class."""
    return {
        statement.target.id: statement.annotation
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(statement.annotation)
    }


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


@cache
def megatron_fields() -> PackageFields:
    """Fields of TransformerConfig (inherited ones too) and MLATransformerConfig, OptimizerConfig and
    DistributedDataParallelConfig.

    Raises:
        ValueError: megatron-core is not installed or lacks one of the classes.
    """
    folder = package_folder("megatron")
    annotations: dict[str, ast.expr] = {}
    for name, source in MEGATRON_SOURCES.items():
        found = [node for node in _classes(folder / source) if node.name == name]
        if not found:
            raise ValueError(f"megatron-core: {source} holds no class {name}; this version is not supported")
        annotations |= _annotations(found[0])
    return PackageFields(annotations, _enumerations(folder / MEGATRON_ENUMERATIONS))


@cache
def sglang_fields() -> PackageFields:
    """Fields of SGLang's ServerArgs, which its namespaces in srt/arg_groups/fields declare.

    Raises:
        ValueError: sglang is not installed or declares its arguments in other files.
    """
    folder = package_folder("sglang") / "srt" / "arg_groups"
    sources = sorted((folder / "fields").glob("*.py"))
    annotations: dict[str, ast.expr] = {}
    for source in sources:
        for node in _classes(source):
            if any(isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "_NS_PATH" for item in node.body):
                annotations |= _annotations(node)
    if not annotations:
        raise ValueError("sglang: no argument fields in srt/arg_groups/fields; this version is not supported")
    return PackageFields(annotations, _named_lists(folder / "choices.py"))


@cache
def tool_call_parsers() -> tuple[str, ...]:
    """Names of the installed SGLang's parsers of tool calls.

    Raises:
        ValueError: sglang is not installed or names them in another file.
    """
    path = package_folder("sglang") / "srt" / "function_call" / "parser_names.py"
    names = _named_lists(path).get("TOOL_CALL_PARSER_NAMES") if path.is_file() else None
    if not names:
        raise ValueError(f"sglang: no TOOL_CALL_PARSER_NAMES in {path}; this version is not supported")
    return names
