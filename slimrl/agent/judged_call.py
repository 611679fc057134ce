"""What becomes of a call that a parser has read: one that a tool takes, or a malformed one that says why not."""

from slimrl.agent.call_schemas import CallSchemas
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.base.jsonl import refuse_unwritable
from slimrl.base.strict_json import strict_json

UNREADABLE = "malformed tool call: it cannot be read"


def judged_call(schemas: CallSchemas, name: str, arguments: str, call_id: str = "") -> ToolCall | MalformedCall:
    """The call of a tool with these arguments, which should be JSON.

    Args:
        call_id: as the model wrote it, if its format has ids.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return MalformedCall(problem=UNREADABLE)
    if problem := schemas.unknown_tool(name):
        return MalformedCall(problem=problem)
    try:
        value = strict_json(arguments)
        refuse_unwritable(value)
        problem = schemas.wrong_arguments(name, value)
    except (ValueError, RecursionError):
        return MalformedCall(problem=UNREADABLE, name=name)
    if problem is not None:
        return MalformedCall(problem=problem, name=name)
    return ToolCall(name=name, arguments=value, id=call_id)
