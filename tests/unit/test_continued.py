"""Turns out of several requests, to an engine that answers from a script."""

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.template import ChatTemplate
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode
from slimrl.data.engine import Engine, EngineError, GenerateRequest, GenerateResult
from slimrl.engines import continued as module
from slimrl.engines.continued import ContinuedEngine, continued

TURN = list(range(50, 70))
"""What the engine would sample; the token at a place has the log-prob -place."""
PROMPT = [1, 2, 3]
END = 69


@dataclass
class Fails:
    """A request that raises."""

    after_s: float = 0.0


@dataclass
class Aborts:
    """A request that is aborted after so many tokens; in the queue, it has no experts."""

    tokens: int
    in_queue: bool = False


@dataclass
class TurnEngine(Engine):
    """Continues TURN from where the input ends. The script says how requests end, the later ones as they should."""

    script: list[Any] = field(default_factory=list)
    turn: list[int] = field(default_factory=lambda: list(TURN))
    context: int = 10_000
    requests: list[GenerateRequest] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        self.calls.append((list(session_ids), at_once))

    def close(self, session_id: str) -> None:
        self.calls.append(session_id)

    async def aclose(self) -> None:
        self.calls.append("closed")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        entry = self.script.pop(0) if self.script else None
        if isinstance(entry, Fails):
            await asyncio.sleep(entry.after_s)
            raise EngineError(f"request {len(self.requests)} failed")
        done = len(request.input_ids) - len(PROMPT)
        assert request.input_ids == [*PROMPT, *self.turn[:done]]
        most = min(request.max_new_tokens, self.context - len(request.input_ids))
        tokens, finish = self.turn[done : done + most], "length"
        if END in tokens and END in request.stop_token_ids:
            tokens, finish = tokens[: tokens.index(END) + 1], "stop"
        text = decode(tokens)
        if ends := [text.find(stop) + len(stop) for stop in request.stop if stop in text]:
            tokens, finish = tokens[: min(ends)], "stop"
        if isinstance(entry, Aborts):
            tokens, finish = tokens[: entry.tokens], "abort"
        number = len(self.requests)
        rows = np.arange(len(request.input_ids) + len(tokens) - 1)[request.experts_from :, None, None]
        return GenerateResult(
            tokens=tokens,
            logprobs=[-float(done + place) for place in range(len(tokens))],
            weight_versions=np.full(len(tokens), number, np.int32),
            finish_reason=finish,
            routed_experts=None if isinstance(entry, Aborts) and entry.in_queue else rows.astype(np.int16),
            cached_tokens=number,
            num_retries=number,
        )


def decode(tokens: Sequence[int]) -> str:
    """A letter for each token."""
    return "".join(chr(token + 15) for token in tokens)


def ask(new: int = len(TURN), **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {
        "session_id": "s", "input_ids": PROMPT, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": new,
        "stop_token_ids": (), "timeout_s": 5.0, "seed": 4,
    }  # fmt: skip
    return GenerateRequest(**values | changes)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABORT_DELAY_S", 0.001)


async def whole(engine: TurnEngine, request: GenerateRequest, chunk_tokens: int = 0) -> GenerateResult:
    """The turn, whose figures are those of one request however many there were."""
    result = await ContinuedEngine(engine, chunk_tokens=chunk_tokens, decode=decode).generate(request)
    count = len(result.tokens)
    assert result.tokens == engine.turn[:count]
    assert result.logprobs == [-float(place) for place in range(count)]
    assert len(result.weight_versions) == count
    assert result.weight_versions.dtype == np.int32
    rows = range(request.experts_from, len(PROMPT) + count - 1)
    assert result.routed_experts is not None
    assert result.routed_experts[:, 0, 0].tolist() == list(rows)
    for sent in engine.requests:
        assert (sent.seed, sent.session_id, sent.stop, sent.temperature) == (4, "s", request.stop, 1.0)
        assert sent.timeout_s <= request.timeout_s
    return result


@pytest.mark.parametrize(
    ("chunk_tokens", "asked"), [(0, [20]), (7, [7, 7, 6]), (10, [10, 10]), (19, [19, 1]), (20, [20]), (64, [20])]
)
async def test_a_turn_is_asked_for_in_chunks(chunk_tokens: int, asked: list[int]):
    engine = TurnEngine()
    result = await whole(engine, ask(experts_from=2), chunk_tokens)
    assert [request.max_new_tokens for request in engine.requests] == asked
    assert (len(result.tokens), result.finish_reason, result.cached_tokens) == (20, "length", 1)
    numbers = range(1, len(asked) + 1)
    assert result.weight_versions.tolist() == np.repeat(numbers, asked).tolist()
    assert result.num_retries == sum(numbers)


async def test_a_turn_ends_with_the_chunk_that_ends_it():
    engine = TurnEngine(turn=[50, 51, 52, 53, END, 54])
    result = await whole(engine, ask(stop_token_ids=(END,)), 4)
    assert (len(result.tokens), result.finish_reason, len(engine.requests)) == (5, "stop", 2)
    # An engine whose context is full answers with fewer tokens than asked for.
    engine = TurnEngine(context=len(PROMPT) + 6)
    result = await whole(engine, ask(), 4)
    assert (len(result.tokens), result.finish_reason, len(engine.requests)) == (6, "length", 2)


@pytest.mark.parametrize("chunk_tokens", [0, 8])
async def test_what_was_aborted_goes_on(chunk_tokens: int):
    engine = TurnEngine([Aborts(0, in_queue=True), Aborts(3), Aborts(2, in_queue=True), Aborts(4)])
    result = await whole(engine, ask(experts_from=1), chunk_tokens)
    assert [len(request.input_ids) for request in engine.requests][:5] == [3, 3, 6, 8, 12]
    assert [request.experts_from for request in engine.requests][:5] == [1, 1, 5, 5, 11]
    assert (len(result.tokens), result.finish_reason) == (20, "length")
    assert result.weight_versions.tolist()[:10] == [2] * 3 + [3] * 2 + [4] * 4 + [5]


@pytest.mark.parametrize(
    ("turn", "aborts", "changes", "finish"),
    [
        (TURN, 20, {}, "length"),
        ([50, 51, END], 3, {"stop_token_ids": (END,)}, "stop"),
        ([50, 51, 52], 3, {"stop": ("BC",)}, "stop"),
    ],
)
async def test_an_abort_after_the_last_token_ends_the_turn(turn, aborts: int, changes, finish: str):
    engine = TurnEngine([Aborts(aborts)], turn=[*turn, 7, 7, 7])
    result = await whole(engine, ask(**changes), 0)
    assert (result.tokens, result.finish_reason, len(engine.requests)) == (turn, finish, 1)


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_turn_fails_with_its_part_which_is_sent_again_elsewhere(failing: int):
    engine = TurnEngine([*[None] * (failing - 1), Fails()])
    with pytest.raises(EngineError, match=f"request {failing} failed"):
        await whole(engine, ask(), 8)
    assert len(engine.requests) == failing


async def test_the_deadline_is_of_all_parts_together():
    engine = TurnEngine([Aborts(1)] * 10_000, turn=TURN * 500)
    with pytest.raises(EngineError, match=r"session s: \d+ of at most 9999 tokens within 0\.1 s"):
        await whole(engine, ask(9999, timeout_s=0.1))
    left = [request.timeout_s for request in engine.requests]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.05 < left[0] <= 0.1


@pytest.mark.parametrize("chunk_tokens", range(1, 12))
@pytest.mark.parametrize(
    ("stop", "count"),
    [(("FGH",), 7), (("GHI", "FGHIJ"), 8), (("A",), 0), (("RST",), 19), (("FGHIJ", "HI"), 8), (("none", "HI"), 8)],
)
async def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it(chunk_tokens: int, stop, count: int):
    """TURN is A to T; 'A' is before every answer."""
    one, engine = TurnEngine(turn=TURN[1:]), TurnEngine(turn=TURN[1:])
    request = ask(19, stop=stop)
    expected = await one.generate(request)
    result = await whole(engine, request, chunk_tokens)
    assert len(result.tokens) == len(expected.tokens) == (count or 19)
    assert result.finish_reason == expected.finish_reason == ("stop" if count else "length")


async def test_a_letter_of_several_tokens_may_lie_across_two_chunks():
    """Each token is a byte, and the stop text has letters of two and three."""
    text = "an é and a €uro; é€ ends it, é€ not"
    turn = [byte + 500 for byte in text.encode()]

    def decode_bytes(tokens: Sequence[int]) -> str:
        return bytes(token - 500 for token in tokens).decode(errors="replace")

    for chunk_tokens in range(1, 30):
        engine = ContinuedEngine(TurnEngine(turn=turn), chunk_tokens=chunk_tokens, decode=decode_bytes)
        # The scripted engine itself finds no stop text, so that of one in a single chunk only the wrapper knows.
        result = await engine.generate(ask(len(turn), stop=("é€",)))
        assert decode_bytes(result.tokens) == "an é and a €uro; é€"


async def test_sessions_and_connections_are_the_engines():
    engine = TurnEngine()
    wrapped = ContinuedEngine(engine, chunk_tokens=4, decode=decode)
    wrapped.open(["a", "b"], at_once=2)
    wrapped.close("a")
    await wrapped.aclose()
    assert engine.calls == [(["a", "b"], 2), "a", "closed"]


def test_an_engine_is_wrapped_where_the_recipe_needs_it():
    recipe, engine = Recipe(), TurnEngine()
    assert continued(engine, recipe, decode) is engine
    recipe.resync.pause = PauseMode.abort
    assert isinstance(continued(engine, recipe, decode), ContinuedEngine)
    recipe.resync.pause, recipe.rollout.chunk_tokens = PauseMode.in_place, 8
    template = ChatTemplate(build_tokenizer())
    wrapped = continued(engine, recipe, template.decode)
    assert pickle.loads(pickle.dumps(wrapped))._chunk_tokens == 8
