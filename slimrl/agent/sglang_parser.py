"""Tool calls as SGLang's own parsers read them, so that a policy is trained on what its server will understand.

SGLang's parsers differ in what they do about broken calls: they skip them, skip the good ones next to them, take them
half, or raise. So each call is cut out by its markers and parsed alone where the format has markers, and checked: a
marker without exactly one call, an unknown tool and arguments that its schema refuses are malformed.
"""

import ast
import importlib
import importlib.util
import logging
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from slimrl.agent.call_schemas import CallSchemas
from slimrl.agent.judged_call import UNREADABLE, judged_call
from slimrl.agent.parsers import ParsedTurn
from slimrl.agent.tool_call import MalformedCall, ToolCall

NOT_OPENED, NOT_CLOSED = "malformed tool call: nothing opened it", "malformed tool call: not closed"


@dataclass(frozen=True, kw_only=True)
class Markers:
    """The texts around each call, and around all calls of a turn."""

    open: str
    close: str
    section_open: str = ""
    section_close: str = ""
    call_id: str = ""
    """Regular expression whose group is the id that the model gives its call."""

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.open, self.close, self.section_open, self.section_close)))


_TOOL_CALL = Markers(open="<tool_call>", close="</tool_call>")
_DEEPSEEK = Markers(
    open="<｜tool▁call▁begin｜>",
    close="<｜tool▁call▁end｜>",
    section_open="<｜tool▁calls▁begin｜>",
    section_close="<｜tool▁calls▁end｜>",
)
_KIMI = Markers(
    open="<|tool_call_begin|>",
    close="<|tool_call_end|>",
    section_open="<|tool_calls_section_begin|>",
    section_close="<|tool_calls_section_end|>",
    call_id=r"\s*([^\s<|]+)",
)
_MINIMAX = Markers(
    open='<invoke name="',
    close="</invoke>",
    section_open="<minimax:tool_call>",
    section_close="</minimax:tool_call>",
)


def _hunyuan_markers(suffix: str) -> Markers:
    """Hy3's, where its tokenizer gives them a suffix."""
    return Markers(
        open=f"<tool_call{suffix}>",
        close=f"</tool_call{suffix}>",
        section_open=f"<tool_calls{suffix}>",
        section_close=f"</tool_calls{suffix}>",
    )


MARKERS: dict[str, Markers] = {
    **dict.fromkeys(("qwen", "qwen25", "hermes", "qwen3_coder", "glm", "glm45", "glm47"), _TOOL_CALL),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), _DEEPSEEK),
    "hunyuan": _hunyuan_markers(""),
    "kimi_k2": _KIMI,
    "minimax-m2": _MINIMAX,
}
"""Formats whose calls are parsed one by one. A turn of any other is parsed whole, so that a broken call next to a good
one goes unnoticed."""


_MARKED_AT_START = {"llama3": "<|python_tag|>"}
"""Formats in which a text is a call by its beginning alone -> the marker that says so for certain."""

_TAGS = ("<arg_key{}>", "</arg_key{}>", "<arg_value{}>", "</arg_value{}>")


def _has_pairs(text: str, suffix: str = "") -> bool:
    """Whether GLM's and Hy3's tags of arguments come in their order; else SGLang's search takes the cube of the text's
    length.

    Args:
        suffix: of the tags.
    """
    tags = [tag.format(suffix) for tag in _TAGS]
    found = re.findall("|".join(map(re.escape, tags)), text)
    return len(found) % 4 == 0 and all(tag == tags[place % 4] for place, tag in enumerate(found))


class _Vocabulary:
    """What SGLang's parser of Hy3's calls asks a tokenizer for: the spelling of its markers.

    Args:
        tokens: `marker_tokens` of the model.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        # Hy3's have a separator behind the name, and nothing says so of a model without any token.
        self._tokens = tokens or ("<tool_call>", "<tool_sep>")

    @property
    def suffix(self) -> str:
        found = next((text for text in self._tokens if text.startswith("<tool_call:")), "<tool_call>")
        return found.removeprefix("<tool_call").removesuffix(">")

    def get_vocab(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self._tokens)}


_PARAMETER = re.compile(r'<parameter name="[^">]*">(?:(?!<parameter name=").)*?</parameter>', re.DOTALL)


def _has_whole_parameters(text: str) -> bool:
    """Whether each parameter of MiniMax-M2's calls is closed before the next; SGLang also reads those that are not."""
    rest = _PARAMETER.sub("", text)
    return "<parameter" not in rest and "</parameter" not in rest


def _has_call_list(text: str) -> bool:
    """Whether there is a list of calls in Python's syntax; SGLang's search takes exponential time else."""
    try:
        parsed = ast.parse(text[text.find("[") : text.rfind("]") + 1].strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(parsed.body, ast.List) and all(isinstance(item, ast.Call) for item in parsed.body.elts)


_SAFE: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("glm", "glm45", "glm47"), _has_pairs),
    **dict.fromkeys(("pythonic", "lfm2"), _has_call_list),
    "hunyuan": _has_pairs,
    "minimax-m2": _has_whole_parameters,
}
"""Parser -> whether it may look at a text; what a policy writes may be of any kind."""


class SGLangParser:
    """One of SGLang's parsers.

    Args:
        name: as SGLang's `--tool-call-parser`.
        schemas: of the tools.
        tokens: `marker_tokens` of the model.

    Raises:
        ValueError: the parser needs more than the tools, or the parameters of one are no JSON schema.
    """

    def __init__(self, name: str, schemas: Sequence[dict[str, Any]], tokens: Sequence[str] = ()) -> None:
        self._vocabulary = _Vocabulary(tokens)
        self._markers, self._is_safe = MARKERS.get(name), _SAFE.get(name, bool)
        if name == "hunyuan":
            suffix = self._vocabulary.suffix
            self._markers, self._is_safe = _hunyuan_markers(suffix), partial(_has_pairs, suffix=suffix)
        self.close_marker = self._markers.close if self._markers else ""
        self.all_markers = self._markers.all if self._markers else ()
        """A text without any of these has no call; empty if that cannot be said."""
        self._name = name
        self._sglang = _function_calls()
        self._tools = [self._sglang.Tool(**schema) for schema in schemas]
        self._schemas = CallSchemas(schemas)
        try:
            self._parser()
        except ValueError as error:
            raise ValueError(f"{name} cannot be used here: {error}") from error

    def parse(self, text: str) -> ParsedTurn:
        if self._markers is None:
            return self._parse_whole(text)
        content, parts = _cut(text, self._markers)
        return ParsedTurn(content=content.strip(), calls=[call for part in parts for call in self._read_part(part)])

    def _parse_whole(self, text: str) -> ParsedTurn:
        if not self._is_safe(text):
            return ParsedTurn(content=text.strip(), calls=[])
        unmarked = self._name in _MARKED_AT_START and _MARKED_AT_START[self._name] not in text
        content, calls = self._read(text)
        if unmarked:
            # Text that begins like a call may be an answer, as JSON is.
            calls = [call for call in calls if call[0]]
        elif not calls and self._has_call(text):
            return ParsedTurn(content=content.strip(), calls=[MalformedCall(problem=UNREADABLE)])
        if not calls:
            return ParsedTurn(content=text.strip(), calls=[])
        return ParsedTurn(content=content.strip(), calls=[judged_call(self._schemas, *call) for call in calls])

    def _read_part(self, part: str) -> list[ToolCall | MalformedCall]:
        """The call of a part; several if it holds the opening of another one and cannot be read whole."""
        assert self._markers is not None
        opening, call = self._markers.open, self._one(part, self._markers)
        if isinstance(call, ToolCall) or opening not in part[len(opening) :]:
            return [call]
        *unclosed, last = part.split(opening)[1:]
        return [MalformedCall(problem=NOT_CLOSED) for _ in unclosed] + [self._one(opening + last, self._markers)]

    def _one(self, part: str, markers: Markers) -> ToolCall | MalformedCall:
        if not part.startswith(markers.open):
            return MalformedCall(problem=NOT_OPENED)
        if not part.endswith(markers.close):
            return MalformedCall(problem=NOT_CLOSED)
        _, calls = self._read(markers.section_open + part + markers.section_close)
        if len(calls) != 1:
            return MalformedCall(problem=UNREADABLE)
        written = re.match(markers.call_id, part[len(markers.open) :])
        return judged_call(self._schemas, *calls[0], written.group(1) if written and markers.call_id else "")

    def _read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The text outside calls, and (name, arguments as JSON) of each that SGLang reads."""
        if not self._is_safe(text):
            return text, []
        with self._sglang.forward_unknown_tools():
            try:
                content, items = self._parser().parse_non_stream(text)
            except Exception:  # noqa: BLE001 - what SGLang's parsers raise on broken text is of any type
                return text, []
        return content or "", [(item.name or "", item.parameters or "") for item in items]

    def _has_call(self, text: str) -> bool:
        return bool(self._parser().has_tool_call(text))

    def _parser(self) -> Any:
        # A new one each time: some keep state.
        return self._sglang.FunctionCallParser(self._tools, self._name, tokenizer=self._vocabulary)


def _cut(text: str, markers: Markers) -> tuple[str, list[str]]:
    """The text outside calls, and each call with its markers; an unclosed or unopened one lacks one of them."""
    opening, closing = re.escape(markers.open), re.escape(markers.close)
    section = [re.escape(marker) for marker in (markers.section_open, markers.section_close) if marker]
    ends = "|".join([closing, *(f"(?={marker})" for marker in section), r"\Z"])
    call = re.compile(f"{opening}.*?(?:{ends})|{closing}", re.DOTALL)
    parts = [match.group() for match in call.finditer(text)]
    content = call.sub("", text)
    if section:
        if not parts and markers.section_open in content:
            parts = [markers.open]
        content = re.sub("|".join(section), "", content)
    return content, parts


@cache
def _function_calls() -> Any:
    """What is used of SGLang's package of parsers, imported without what the rest of SGLang imports.

    Importing `sglang` itself takes many seconds and GPU kernels; an empty package in its place does for these modules.
    """
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "sglang"}
    try:
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("SGLang is not installed")
        package = types.ModuleType("sglang")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["sglang"] = package
        parser = importlib.import_module("sglang.srt.function_call.function_call_parser")
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        environ = importlib.import_module("sglang.srt.environ")
    finally:
        for name in list(sys.modules):
            if name.split(".")[0] == "sglang":
                del sys.modules[name]
        sys.modules.update(before)
    # They log each broken call as an error of theirs; here it is the policy's, and counted.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL + 1)
    return types.SimpleNamespace(
        FunctionCallParser=parser.FunctionCallParser,
        Tool=protocol.Tool,
        forward_unknown_tools=lambda: environ.envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True),
    )
