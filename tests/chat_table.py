"""The table of docs/chat.md, from the chat formats themselves: `python tests/chat_table.py` prints it."""

from chat_templates import MODELS, Model

from slimrl.chat.chat_format import CallName, tool_results


def rows() -> list[str]:
    header = ("like", "`model_type`", "a turn ends at", "calls are read by", "after a call and its result", "thinking")
    lines = [header, ("---",) * len(header), *(_row(model) for model in MODELS.values())]
    return [f"| {' | '.join(line)} |" for line in lines]


def _row(model: Model) -> tuple[str, ...]:
    chat = model.chat()
    ends = ", ".join(f"`{text}`" + " (calls too)" * (token in chat.call_ends)
                     for text, token in zip(model.stops, chat.stop_token_ids, strict=True))  # fmt: skip
    (call_end,) = chat.call_ends
    calls = [CallName(id="functions.f:0", name="f")]
    join = chat.join(call_end, calls, tool_results(calls, ["RESULT"]), None)
    return (
        model.like,
        f"`{model.model_type}`",
        ends.replace("|", "\\|"),
        f"`{model.parser}`" + ("" if model.parallel else ", one call a turn"),
        f"`{chat.template.decode(join.tokens)}`".replace("\n", "\\n").replace("|", "\\|"),
        _thinking(model),
    )


def _thinking(model: Model) -> str:
    chat = model.chat()
    if not model.thinks:
        return "none"
    opened = chat.prompt([{"role": "user", "content": "q"}], None).opens_thinking
    words = "the header opens it" if opened else "the policy opens it"
    return words + ("; dropped from earlier turns, also within an episode" if model.rewrites else "")


if __name__ == "__main__":
    print("\n".join(rows()))
