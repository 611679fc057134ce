"""Where a turn ends by a text of the client."""

from types import SimpleNamespace

import pytest

from slimrl.agent.assistant_turn import parse_turn
from slimrl.agent.chat.thinking import split_thinking
from slimrl.agent.parsers import ParsedTurn
from slimrl.agent.tool_call import ToolCall

CHAT = SimpleNamespace(
    turn_text=lambda tokens: "".join(map(chr, tokens)),
    split_turn=split_thinking,
    stop_token_ids={0},
    answer_ends={0},
    takes_parallel_calls=True,
)
DIALOGUE = SimpleNamespace(
    chat=CHAT, stop_token_ids={0}, call_ends=set(),
    parser=SimpleNamespace(parse=lambda text: ParsedTurn(content=text, calls=[])),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("Observation: 3", ["Observation:"], ""),
        ("so Observation: 3", ["Observation:"], "so "),
        ("END Observation: 3", ["Observation:", "END"], ""),
        ("a END Observation: 3", ["Observation:", "END"], "a "),
        ("nothing of it", ["Observation:", "END"], "nothing of it"),
    ],
)
async def test_a_turn_ends_before_the_first_text_that_stops_it_also_where_it_begins_with_it(text, stop, said):
    found = await parse_turn([*map(ord, text)], DIALOGUE, in_thinking=False, cut_off=False, num_calls=0, stop=stop)
    assert found is not None
    assert found.text == said


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["a:0", "a:0", "a:0"], ["a:0", "call_5", "call_6"]),
        (["", "call_4", ""], ["call_5", "call_4", "call_6"]),
        (["", "a:0", ""], ["call_4", "a:0", "call_6"]),
    ],
)
async def test_each_call_of_a_turn_has_an_id_of_its_own(written, ids):
    calls = [ToolCall(name="a", arguments={"number": number}, id=one) for number, one in enumerate(written)]
    parser = SimpleNamespace(parse=lambda text: ParsedTurn(content=text, calls=calls))
    dialogue = SimpleNamespace(**{**vars(DIALOGUE), "parser": parser})
    found = await parse_turn([65], dialogue, in_thinking=False, cut_off=False, num_calls=4)
    assert found is not None
    assert [call.id for call in found.calls] == ids
    assert [call.arguments["number"] for call in found.calls] == [0, 1, 2]
