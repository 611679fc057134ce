"""What a system message says of the tools, for models whose chat template does not show them (`agent.tool_prompt`).

deepseek_v31: as the model card of DeepSeek-V3.1 has it under "ToolCall". deepseek_v3: as that of DeepSeek-V2.5 has it
under "Function calling", which that of DeepSeek-V3-0324 refers to. deepseek_v32: as DeepSeek-V3.2's own code has it, of
which SGLang's server has a copy.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from slimrl.config.package_fields import package_folder

ToolPrompt = Callable[[Sequence[dict[str, Any]]], str]
"""Function that gives the text for these schemas."""

_PLACE = "{tools}"
_GAP = "\n\n"
"""What stands between a system message and the prompt; DeepSeek-V3.2's begins with it, also where there is none."""


def tool_prompt(setting: str) -> ToolPrompt | None:
    """The prompt of that name, or that text with the schemas in place of `{tools}`; None for no setting."""
    if not setting or setting in PUBLISHED:
        return PUBLISHED.get(setting)
    return lambda schemas: setting.replace(_PLACE, "\n".join(map(_json, schemas)))


def with_tools(messages: Sequence[dict[str, Any]], prompt: str) -> list[dict[str, Any]]:
    """The messages with the prompt at the end of the system message, or as one."""
    if messages and messages[0]["role"] == "system":
        given = messages[0]["content"]
        gap = _GAP if given and not prompt.startswith(_GAP) else ""
        return [{**messages[0], "content": f"{given}{gap}{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _deepseek_v3(schemas: Sequence[dict[str, Any]]) -> str:
    functions = [schema["function"] for schema in schemas]
    shown = [f"- `{each['name']}`:\n```json\n{_json(each, indent=4)}\n```" for each in functions]
    return "\n\n".join(["## Tools", "### Function", "You have the following functions available:", *shown])


def _deepseek_v31(schemas: Sequence[dict[str, Any]]) -> str:
    functions = [schema["function"] for schema in schemas]
    shown = "\n\n".join(
        f"### {each['name']}\nDescription: {each.get('description') or ''}\n\n"
        f"Parameters: {_json(each.get('parameters') or {})}"
        for each in functions
    )
    return f"## Tools\nYou have access to the following tools:\n\n{shown}\n\n{_V31_FORMAT}"


_V31_FORMAT = (
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\n"
    "Where:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces"
)


def _deepseek_v32(schemas: Sequence[dict[str, Any]]) -> str:
    shown: str = _encoding_of_v32().render_tools([schema["function"] for schema in schemas])
    return _GAP + shown


@cache
def _encoding_of_v32() -> ModuleType:
    """SGLang's copy of DeepSeek's code, without importing the rest of SGLang."""
    path = package_folder("sglang") / "srt" / "entrypoints" / "openai" / "encoding_dsv32.py"
    spec = importlib.util.spec_from_file_location("encoding_dsv32", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"sglang: no {path}; this version is not supported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLISHED: dict[str, ToolPrompt] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "deepseek_v32": _deepseek_v32,
}


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
