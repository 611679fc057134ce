"""The tables of docs/chat.md, from the templates themselves: `python tests/chat_table.py` prints them."""

import json

from chat_templates import MODELS, Model
from chat_texts import (
    PLAYED,
    TOOLS,
    Script,
    answer_end,
    answer_text,
    call_end,
    call_text,
    play,
    rendering,
    thought_text,
)
from published_templates import rendered

from slimrl.agent.chat.chat_format import CallName, tool_results
from slimrl.data.trajectory import Status

_USER = {"role": "user", "content": "the question"}
_ARGUMENTS = {"x": "an argument"}
_THOUGHT = {"reasoning_content": "a thought", "thinking": "a thought"}


def tables() -> list[list[str]]:
    """(what slimrl reads and writes, what each template keeps and what becomes of an episode)"""
    how = ("like", "`model_type`", "a turn ends at", "calls are read by", "after a call and its result", "thinking")
    kept = ("like", "tools are shown", "calls", "words before a call", "thinking in an episode",
            "after a next question", "`tool_calls: []`", "turns join token for token", "segments by the template",
            "examples")  # fmt: skip
    return [
        _table(how, [_formats(key) for key in PLAYED]),
        _table(kept, [_checks(key) for key in MODELS]),
    ]


def _table(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> list[str]:
    """Models with the same cells share a line."""
    models: dict[tuple[str, ...], list[str]] = {}
    for model, *cells in lines:
        models.setdefault(tuple(cells), []).append(model)
    joined = [("<br>".join(names), *cells) for cells, names in models.items()]
    return [f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *joined)]


def _formats(key: str) -> tuple[str, ...]:
    model = MODELS[key]
    chat = model.chat()
    ends = ", ".join(f"`{text}`" + " (calls too)" * (token in chat.call_ends)
                     for text, token in zip(model.stops, chat.stop_token_ids, strict=True))  # fmt: skip
    (call_end_id,) = chat.call_ends
    calls = [CallName(id="functions.f:0", name="f")]
    join = chat.join(call_end_id, calls, tool_results(calls, ["RESULT"]), TOOLS.schemas)
    return (
        model.like,
        f"`{model.model_type}`",
        ends.replace("|", "\\|"),
        f"`{model.parser}`" + ("" if model.parallel else ", one call a turn"),
        f"`{chat.template.decode(join.tokens)}`".replace("\n", "\\n").replace("|", "\\|"),
        _thinking(model),
    )


def _thinking(model: Model) -> str:
    if not model.thought:
        return "none"
    opened = model.chat().prompt([_USER], None).opens_thinking
    after = ", none after a result" if model.thought_after_results == "" else ""
    return ("the header opens it" if opened else "the policy opens it") + after


def _checks(key: str) -> tuple[str, ...]:
    model = MODELS[key]
    return (
        model.like,
        "yes" if "Add." in (_written(model, _USER, shown=True) or "") else "**no**",
        _calls(model),
        _words(model),
        _thought(model, _called(model, **_THOUGHT)),
        _thought(model, {"role": "assistant", "content": "said", **_THOUGHT}, _USER),
        _empty_calls(model),
        *_episode(key),
    )


def _written(model: Model, *messages: dict, shown: bool = False) -> str | None:
    """By the template alone, as transformers takes it; None if it refuses the messages."""
    template = (shown and model.tool_template) or model.template
    tools = list(TOOLS.schemas) if shown else None
    return rendered(template, messages, tools, generate=False, variables=model.kwargs)


def _called(model: Model, *, content: str | None = "", number: int = 0, **parts) -> dict:
    """A turn with a call, its arguments in the form that the template takes."""
    arguments = json.dumps(_ARGUMENTS) if model.calls in ("", "deepseekv3", "deepseekv31") else _ARGUMENTS
    call = {"id": f"functions.f:{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **parts}


def _has(model: Model, words: str, *messages: dict) -> bool:
    return words in (_written(model, *messages, shown=True) or "")


def _calls(model: Model) -> str:
    if _has(model, "an argument", _USER, _called(model)):
        return "kept" if not _has(model, "functions.f:0", _USER, _called(model, number=7)) else "numbered anew"
    return (
        "only if content is null" if _has(model, "an argument", _USER, _called(model, content=None)) else "**dropped**"
    )


def _words(model: Model) -> str:
    turn = _called(model, content="some words")
    if not _has(model, "an argument", _USER, turn):
        return "-"
    result = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "a result"}
    first = _has(model, "some words", _USER, turn)
    later = _has(model, "some words", _USER, _called(model), result, turn)
    return ("kept" if later else "**kept before the first call only**") if first else "**dropped**"


def _thought(model: Model, *messages: dict) -> str:
    return "kept" if _has(model, "a thought", _USER, *messages) else "dropped"


def _empty_calls(model: Model) -> str:
    answer = {"role": "assistant", "content": "an answer"}
    empty = _written(model, _USER, {**answer, "tool_calls": []}, shown=True)
    if empty is None:
        return "refused"
    return "none" if empty == _written(model, _USER, answer, shown=True) else "**loses the answer**"


def _episode(key: str) -> tuple[str, str, str]:
    """(whether each context of three turns is the template's rendering, segments by the template, learned in SFT)"""
    if key not in PLAYED:
        return ("no calls", "-", "-")
    model = MODELS[key]
    second = [{"a": 3, "b": 3}, {"a": 4, "b": 4}][: 1 + model.parallel]
    turns = (
        thought_text(key, "First.") + call_text(key, {"a": 1, "b": 2}) + call_end(key),
        thought_text(key, "Then.", after_tools=True) + call_text(key, *second, first_id=1) + call_end(key),
        thought_text(key, "Done.", after_tools=True) + answer_text(key, "It is 6.") + answer_end(key),
    )
    engine = Script(model, *turns)
    trajectory = play(model, engine)
    if trajectory.status is not Status.completed:
        return ("refused", "-", "-")
    by_template = play(model, Script(model, *turns), history="template")
    return _joins(key, engine, trajectory), str(len(by_template.segments)), _examples(key, trajectory, "".join(turns))


def _joins(key: str, engine: Script, trajectory) -> str:
    places = [number for number, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    encode = MODELS[key].chat().template.encode
    for turn, (place, context) in enumerate(zip(places, engine.contexts, strict=True)):
        if encode(rendering(key, trajectory.messages[:place], generate=True)) != context:
            return f"up to turn {turn}"
    return "yes"


def _examples(key: str, trajectory, turns: str) -> str:
    chat = MODELS[key].chat()
    try:
        sequences = chat.training_sequences(trajectory.messages, TOOLS.schemas)
    except ValueError:
        return "refused"
    learned = "".join(
        chat.template.decode([token for token, bit in zip(tokens, mask, strict=True) if bit])
        for tokens, mask in sequences
    )
    if learned != turns:
        return "learned as the template writes them"
    try:
        chat.training_sequences([_USER, {"role": "assistant", "content": "It is 6."}], None)
    except ValueError:
        return "only turns with thinking"
    return "learned whole"


if __name__ == "__main__":
    print("\n\n".join("\n".join(table) for table in tables()))
