"""The files that an environment's data consists of. Needs the standard library alone: other interpreters write them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimrl.agent.environment import Message
from slimrl.base.jsonl import write_lines
from slimrl.data.prompt import Prompt


def prompt_of(line: dict[str, Any]) -> Prompt:
    """The prompt of a line of a prompt file, of those that have a text as `prompt`."""
    messages = [{"role": "user", "content": line["prompt"]}]
    return Prompt(prompt_id=line["id"], messages=messages, label=line["label"], metadata=line["metadata"])


def write_demonstrations(out: Path, conversations: Iterable[list[Message]]) -> None:
    """Write them as `sft.jsonl`, and their texts as `words.txt`, for a tokenizer that knows these words."""
    shown = list(conversations)
    write_lines(out / "sft.jsonl", ({"messages": messages} for messages in shown))
    texts = dict.fromkeys(str(message["content"]) for messages in shown for message in messages)
    (out / "words.txt").write_text("\n".join(texts) + "\n")
