"""The JSON of a request's body, within bounds that follow from the context's length.

What cannot fit into the context is refused before it is validated, rendered or tokenized, since all of these take time
and memory by the length of what they get. Commas and brackets are counted before the JSON is read.
"""

from itertools import chain
from typing import Any

from slimrl.agent.gateway.errors import BudgetSpent, refused
from slimrl.base.jsonl import refuse_unwritable
from slimrl.base.strict_json import strict_json

CHARS_PER_TOKEN = 32
"""Characters of a request for each token of the context. Text has about four; only long runs of blanks or of one sign
have more than this on average."""
VALUES_PER_TOKEN, FREE_VALUES = 4, 16_384
"""Values of JSON of a request for each token of the context, and without any: tools and messages have several."""
MAX_TOOL_VALUES = 8192
"""Values of JSON in all tools together: whether they are schemas takes half a millisecond for some of them"""


def json_body(raw: bytes, max_tokens: int) -> dict[str, Any]:
    """The object of a body.

    Args:
        max_tokens: length of the context.

    Raises:
        BudgetSpent: it has more text or values than a context can hold.
        ApiError: it is no JSON object, has a key twice, or cannot be written into a file.
    """
    most_chars, most_values = CHARS_PER_TOKEN * max_tokens, VALUES_PER_TOKEN * max_tokens + FREE_VALUES
    _bound(raw.count(b",") + raw.count(b"[") + raw.count(b"{"), most_chars + most_values, "commas and brackets")
    try:
        value = strict_json(raw.decode())
        if not isinstance(value, dict):
            raise refused("the body is no JSON object")
        chars, values = _size(value)
        _bound(chars, most_chars, "characters of text")
        _bound(values, most_values, "values")
        _bound(_size(value.get("tools"))[1], MAX_TOOL_VALUES, "values in tools")
        refuse_unwritable(value)
    except (ValueError, RecursionError) as error:
        raise refused(f"the body is no JSON: {error}") from error
    return value


def _bound(count: int, most: int, noun: str) -> None:
    if count > most:
        raise BudgetSpent(
            f"the request has {count} {noun}, and the context has room for at most {most}",
            code="context_length_exceeded",
        )


def _size(value: Any) -> tuple[int, int]:
    """Characters of all texts and keys, and how many values there are."""
    chars = values = 0
    level: list[Any] = [value]
    while level:
        values += len(level)
        chars += sum(len(one) for one in level if isinstance(one, str))
        objects = [one for one in level if isinstance(one, dict)]
        chars += sum(map(len, chain.from_iterable(objects)))
        lists = [one for one in level if isinstance(one, list)]
        level = list(chain.from_iterable([*(one.values() for one in objects), *lists]))
    return chars, values
