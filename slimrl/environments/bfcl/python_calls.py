"""Calls as Python text, the form that BFCL's ground truth and checker have."""

import ast
import keyword
import math
from collections.abc import Mapping, Sequence
from typing import Any


def call_text(name: str, arguments: Mapping[str, Any]) -> str | None:
    """The call as Python text that evaluates to nothing but this call; None if there is none.

    Args:
        name: of a function; it must be known to be one.
        arguments: values of JSON.
    """
    names_fit = all(each.isidentifier() and not keyword.iskeyword(each) for each in arguments)
    if not names_fit or not _is_finite(arguments):
        return None
    return f"{name}({','.join(f'{each}={value!r}' for each, value in arguments.items())})"


def parse_call(text: str) -> dict[str, Any]:
    """`{"name", "arguments"}` of a Python call with keyword arguments that are constants.

    Raises:
        ValueError: it is something else.
    """
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{text!r} is no call with keyword arguments")
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return {"name": call.func.id, "arguments": arguments}


def with_keywords(text: str, parameters: Mapping[str, Sequence[str]]) -> str:
    """A Python call with its positional arguments named.

    Args:
        parameters: of each function, in order.
    """
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    named = zip(parameters[call.func.id], call.args, strict=False)
    keywords = [*(ast.keyword(arg=name, value=value) for name, value in named), *call.keywords]
    return ast.unparse(ast.Call(func=call.func, args=[], keywords=keywords))


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
