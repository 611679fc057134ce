"""A conversation token by token on the terminal, and as JSON."""

import json
from itertools import groupby

from rich.console import Console
from rich.text import Text

from slimrl.base.visible import visible
from slimrl.data.preview import Preview

_STYLES = {"prompt": "dim", "policy": "bold green", "tool": "cyan", "template": "yellow"}


def print_preview(preview: Preview, console: Console) -> None:
    """Print each run of tokens with one source on lines of its own; `■` follows a token at which a turn ends."""
    stops = set(preview.stop_token_ids)
    for number, tokens in enumerate(preview.segments, start=1):
        if len(preview.segments) > 1:
            console.print(f"Segment {number} of {len(preview.segments)}, a sequence of its own:")
        for (source, trained), run in groupby(tokens, key=lambda token: (token.source, token.trained)):
            part = list(run)
            said = "trained on" if trained else "not trained on"
            console.print(Text(f"[{source}, {len(part)} tokens, {said}]", style="bold"))
            text = "".join(t.text + (f" ■{t.id}" if trained and t.id in stops else "") for t in part)
            console.print(Text(text, style=_STYLES[source]))
    sampled = sum(token.trained for tokens in preview.segments for token in tokens)
    total = sum(map(len, preview.segments))
    ends = ", ".join(map(str, sorted(stops)))
    console.print(f"{total} tokens, {sampled} trained on. A turn ends at {ends} (■).")
    if preview.not_repeated:
        said = ", ".join(preview.not_repeated)
        console.print(f"Once a turn is over, the chat template leaves out {said}: see agent.history.")
    if preview.rewrites_results:
        console.print(
            "Once a later call follows, the chat template writes calls or results differently: see agent.history."
        )


def as_json(preview: Preview) -> str:
    """`stop_token_ids`, and `tokens` of all segments one after the other: `id`, `text`, `source` and `trained`.

    `segment_lengths` says where each segment, a sequence of its own, ends; `not_repeated` what the chat template leaves
    out of earlier turns, and `rewrites_results` whether it writes results anew once a later call follows.
    """
    value = {
        "stop_token_ids": list(preview.stop_token_ids),
        "segment_lengths": list(map(len, preview.segments)),
        "not_repeated": preview.not_repeated,
        "rewrites_results": preview.rewrites_results,
        "tokens": [vars(token) for segment in preview.segments for token in segment],
    }
    return visible(json.dumps(value, ensure_ascii=False))
