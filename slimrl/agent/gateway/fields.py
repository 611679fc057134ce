"""What becomes of each field of a request: the one place that decides.

Fields are named by their path, `tools[].strict`. One that is null is absent. One that is neither in the table of its
API nor in the models that read its bodies is unknown: it is ignored, and the run's log says so once.
tests/unit/test_gateway_fields.py compares the tables with the fields that the companies' own clients can send.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    read = "read"
    """The answer follows the field."""
    runs = "the run's"
    """A setting of which the run has its own, which is used instead; the answer says so, and the log once."""
    unused = "unused"
    """The field does not concern what the policy says."""
    ignored = "ignored"
    """The field asks for what the policy cannot do, and the request has a sense without it; the log says so once."""
    refused = "refused"
    """A field without which the request would mean something else, so that it is answered with 400 and the reason."""


@dataclass(frozen=True, kw_only=True)
class Field:
    verdict: Verdict
    reason: str = ""
    """Why a field is ignored or refused; a sentence behind its name"""
    asks_nothing: tuple[Any, ...] = ()
    """Values with which the field is as good as absent; an object is compared by its `type`"""

    def is_absent(self, value: Any) -> bool:
        kind = value.get("type") if isinstance(value, dict) else value
        return any(kind == one and type(kind) is type(one) for one in self.asks_nothing)


def _fields(verdict: Verdict, names: str, reason: str = "", asks_nothing: tuple[Any, ...] = ()) -> dict[str, Field]:
    """The same verdict for several fields, which are named with spaces between them."""
    return dict.fromkeys(names.split(), Field(verdict=verdict, reason=reason, asks_nothing=asks_nothing))


def _table(*groups: Mapping[str, Field]) -> dict[str, Field]:
    joined: dict[str, Field] = {}
    for group in groups:
        twice = joined.keys() & group.keys()
        assert not twice, f"judged twice: {sorted(twice)}"
        joined |= group
    return joined


_READ, _RUNS, _UNUSED, _IGNORED, _REFUSED = Verdict

_FREE = "the policy is sampled freely, so that its answer may be of another form"
_NO_SERVER_TOOLS = "the policy has the tools alone that the agent itself runs"
_NO_MEMORY = "the gateway keeps no conversation by that name. Send the messages."
_WHOLE = "a history stays as the agent sends it; the trajectory is truncated where the context is full"
_LOGPROBS = "the engine reports the log-probs of sampled tokens alone"

_OPENAI = _table(
    _fields(_READ, "model tools stream"),
    _fields(
        _RUNS,
        "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty logit_bias "
        "reasoning reasoning_effort verbosity thinking enable_thinking chat_template_kwargs",
    ),
    _fields(
        _UNUSED,
        "user metadata client_metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options parallel_tool_calls moderation stream_options.include_obfuscation",
    ),
    _fields(_IGNORED, "tool_choice", _FREE, ("auto", "none")),
    _fields(_REFUSED, "top_logprobs", _LOGPROBS, (0,)),
)
CHAT_COMPLETIONS = _table(
    _OPENAI,
    _fields(
        _READ,
        "messages n stop max_tokens max_completion_tokens logprobs stream_options stream_options.include_usage",
    ),
    _fields(_UNUSED, "prediction tools[].function.strict messages[].cache_control"),
    _fields(_IGNORED, "response_format", _FREE, ("text",)),
    _fields(_IGNORED, "web_search_options", _NO_SERVER_TOOLS),
    _fields(_REFUSED, "functions", "this is the API before 2024. Write tools."),
    _fields(_REFUSED, "function_call", "this is the API before 2024. Write tool_choice.", ("auto", "none")),
    _fields(_REFUSED, "audio", "the policy writes text alone"),
    _fields(_REFUSED, "modalities", "the policy writes text alone", (["text"],)),
)
RESPONSES = _table(
    _OPENAI,
    _fields(_READ, "input instructions include max_output_tokens text previous_response_id"),
    _fields(_RUNS, "text.verbosity"),
    _fields(_UNUSED, "stream_options max_tool_calls tools[].strict"),
    _fields(_IGNORED, "text.format", _FREE, ("text",)),
    _fields(_IGNORED, "truncation", _WHOLE, ("disabled",)),
    _fields(_IGNORED, "context_management", _WHOLE),
    _fields(_REFUSED, "background", "a response is given on the request's own connection", (False,)),
    _fields(_REFUSED, "conversation", _NO_MEMORY),
    _fields(_REFUSED, "prompt", "the gateway has no prompts that OpenAI keeps. Send the messages."),
)
ANTHROPIC_MESSAGES = _table(
    _fields(_READ, "model messages system max_tokens tools stop_sequences stream output_config"),
    _fields(_RUNS, "temperature top_p top_k output_config.effort output_config.task_budget"),
    _fields(_RUNS, "thinking", asks_nothing=("disabled",)),
    _fields(
        _UNUSED,
        "metadata service_tier cache_control inference_geo speed billing_policy diagnostics user_profile_id "
        "workspace_id betas fallbacks fallback_credit_token tools[].cache_control tools[].strict "
        "tools[].eager_input_streaming messages[].cache_control",
    ),
    _fields(_IGNORED, "tool_choice", _FREE, ("auto", "none")),
    _fields(_IGNORED, "output_format output_config.format", _FREE),
    _fields(_IGNORED, "context_management compaction", _WHOLE),
    _fields(_IGNORED, "mcp_servers container", _NO_SERVER_TOOLS),
    _fields(_REFUSED, "thread", _NO_MEMORY),
)
