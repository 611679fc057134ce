"""Episodes that are cut off and played again from their logs, on the real episode runner and a made-up engine."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_episode import LAYERS, TOKENIZER, TOPK, runner_of

from slimrl.agent.environment import Observation
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import Engine, EngineError, GenerateRequest, GenerateResult
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.engines.continued import ContinuedEngine
from slimrl.engines.turn_logs import LoggedTurn, TurnLogs, read_turns, write_turns

TURNS, CHUNK = 4, 3
PROMPT = Prompt(prompt_id="p", messages=[{"role": "user", "content": "Begin."}], label=None)
END = TOKENIZER.eos_token_id


class Talk:
    """An environment that answers each turn but the last; `says` changes what."""

    def __init__(self, says: str = "Go on.") -> None:
        self.says = says

    async def start(self, prompt, *, seed, scratch):
        return Observation(messages=prompt.messages)

    async def step(self, turn):
        if turn.index == TURNS - 1:
            return Observation(done=True)
        return Observation(messages=[{"role": "user", "content": self.says if turn.index == 1 else "Yes."}])

    async def close(self):
        return


class MadeUpEngine(Engine):
    """Samples something else under each version, and hangs at the request after `num_answers`."""

    def __init__(self, version: int, num_answers: int = 1000) -> None:
        self.version, self.num_answers = version, num_answers
        self.hangs = asyncio.Event()
        self.requests: list[GenerateRequest] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if len(self.requests) == self.num_answers:
            self.hangs.set()
            await asyncio.Event().wait()
        self.requests.append(request)
        chosen = random.Random(f"{self.version} {request.input_ids}")
        tokens = [END if chosen.random() < 0.1 else chosen.randrange(40, 90) for _ in range(request.max_new_tokens)]
        tokens = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        logprobs = [-chosen.random() for _ in tokens]
        self.tokens += tokens
        self.logprobs += logprobs
        rows = len(request.input_ids) + len(tokens) - 1 - request.experts_from
        return GenerateResult(
            tokens=tokens,
            logprobs=logprobs,
            weight_versions=np.full(len(tokens), self.version, np.int32),
            finish_reason="stop" if tokens[-1] == END else "length",
            routed_experts=np.full((rows, LAYERS, TOPK), self.version, np.int16),
            cached_tokens=0,
        )


def episode(engine: Engine, logs: TurnLogs, *, says: str = "Go on.", seed: int = 5, **sampling: Any):
    decode = partial(TOKENIZER.decode, skip_special_tokens=False)
    runner = runner_of(
        ContinuedEngine(engine, chunk_tokens=CHUNK, decode=decode, logs=logs), environment=lambda: Talk(says),
        max_turns=TURNS, max_trajectory_tokens=400,
    )  # fmt: skip
    settings = SamplingConfig(**{"max_new_tokens": 40, **sampling})
    return runner.run(PROMPT, trajectory_id="t", sampling=settings, seed=seed)


async def cut_off(engine: MadeUpEngine, logs: TurnLogs) -> bool:
    """Play until the engine hangs; whether it did."""
    task, hangs = asyncio.create_task(episode(engine, logs)), asyncio.create_task(engine.hangs.wait())
    await asyncio.wait([task, hangs], return_when=asyncio.FIRST_COMPLETED)
    for one in (task, hangs):
        one.cancel()
    await asyncio.gather(task, hangs, return_exceptions=True)
    return engine.hangs.is_set()


def through_files(folder: Path, logs: TurnLogs) -> dict[str, list[LoggedTurn]]:
    folder.mkdir()
    write_turns(folder, logs.snapshot())
    return read_turns(folder)


def sampled(trajectory: Trajectory) -> tuple[Segment, np.ndarray]:
    [segment] = trajectory.segments
    return segment, np.flatnonzero(segment.loss_mask)


async def test_an_episode_that_was_cut_off_anywhere_goes_on_with_the_tokens_that_it_had(tmp_path: Path):
    for num_answers in range(1000):
        first, second, logs, resumed = MadeUpEngine(1, num_answers), MadeUpEngine(2), TurnLogs(), TurnLogs()
        logs.begin("t")
        if not await cut_off(first, logs):
            break
        resumed.begin("t", through_files(tmp_path / str(num_answers), logs).get("t", ()))
        trajectory = await episode(second, resumed)
        assert trajectory.status is Status.completed
        segment, places = sampled(trajectory)
        known = len(first.tokens)
        assert segment.tokens[places].tolist() == first.tokens + second.tokens
        expected = np.array(first.logprobs + second.logprobs, np.float32)
        np.testing.assert_array_equal(segment.rollout_logprobs[places], expected)
        assert segment.weight_versions[places].tolist() == [1] * known + [2] * len(second.tokens)
        assert trajectory.metadata.get("num_replayed_tokens", 0) == known
        # A token's experts are of its own request: of the one that sampled the token after it.
        assert segment.routed_experts is not None
        np.testing.assert_array_equal(segment.routed_experts[places[:-1], 0, 0][: max(0, known - 1)], 1)
        if known:
            assert len(second.requests[0].input_ids) > places[known - 1]
    assert num_answers > 2 * TURNS, "it was cut off within turns too"


async def test_a_run_that_is_cut_off_twice_goes_on_from_both(tmp_path: Path):
    logs = TurnLogs()
    logs.begin("t")
    first, second = MadeUpEngine(1, 3), MadeUpEngine(2, 3)
    assert await cut_off(first, logs)
    again = TurnLogs()
    again.begin("t", through_files(tmp_path / "first", logs)["t"])
    before = through_files(tmp_path / "before", again)
    assert [turn.key for turn in before["t"]] == [turn.key for turn in logs.snapshot()["t"]], "nothing asked for yet"
    assert await cut_off(second, again)
    last = TurnLogs()
    last.begin("t", through_files(tmp_path / "second", again)["t"])
    third = MadeUpEngine(3)
    segment, places = sampled(await episode(third, last))
    assert segment.tokens[places].tolist() == first.tokens + second.tokens + third.tokens


async def test_what_follows_on_another_answer_is_sampled_again():
    logs, resumed = TurnLogs(), TurnLogs()
    logs.begin("t")
    first, second = MadeUpEngine(1), MadeUpEngine(2)
    await episode(first, logs)
    resumed.begin("t", logs.snapshot()["t"])
    trajectory = await episode(second, resumed, says="Stop.")
    segment, places = sampled(trajectory)
    of_turn = segment.turn_ids[places]
    assert segment.weight_versions[places][of_turn <= 1].tolist() == [1] * int((of_turn <= 1).sum())
    assert segment.weight_versions[places][of_turn > 1].tolist() == [2] * int((of_turn > 1).sum())
    assert trajectory.metadata["num_replayed_tokens"] == int((of_turn <= 1).sum())


@pytest.mark.parametrize("change", [{"seed": 6}, {"temperature": 0.5}, {"max_new_tokens": 41}, {"top_k": 5}])
async def test_nothing_of_another_seed_or_other_settings_is_played_again(change: dict[str, Any]):
    logs, resumed = TurnLogs(), TurnLogs()
    logs.begin("t")
    await episode(MadeUpEngine(1), logs)
    resumed.begin("t", logs.snapshot()["t"])
    segment, places = sampled(await episode(MadeUpEngine(2), resumed, **change))
    assert set(segment.weight_versions[places]) == {2}


async def test_only_trajectories_between_begin_and_forget_are_logged():
    logs = TurnLogs()
    await episode(MadeUpEngine(1), logs)
    assert logs.snapshot() == {}
    logs.begin("t")
    trajectory = await episode(MadeUpEngine(1), logs)
    assert sum(turn.num_tokens for turn in logs.snapshot()["t"]) == trajectory.num_sampled_tokens
    logs.forget("t")
    logs.forget("t")
    assert logs.snapshot() == {}


async def test_a_snapshot_does_not_change_with_the_turn_that_runs():
    logs, engine = TurnLogs(), MadeUpEngine(1, 2)
    logs.begin("t")
    request = GenerateRequest(
        session_id="t", input_ids=[1, 2], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=9, stop_token_ids=(),
        timeout_s=5.0, seed=1,
    )  # fmt: skip
    wrapped = ContinuedEngine(engine, chunk_tokens=2, decode=str, logs=logs)
    with pytest.raises(EngineError):
        await wrapped.generate(replace(request, timeout_s=0.05))
    [turn] = logs.snapshot()["t"]
    assert (len(turn.answers), turn.is_whole) == (2, False)
    engine.num_answers = 100
    resumed = TurnLogs()
    resumed.begin("t", [turn])
    held = resumed.snapshot()["t"][0].answers
    result = await ContinuedEngine(engine, chunk_tokens=2, decode=str, logs=resumed).generate(request)
    assert len(held) == 2
    assert result.tokens == engine.tokens


def test_answers_pass_through_files_as_they_are(tmp_path: Path):
    def answer(tokens: Sequence[int], experts: np.ndarray | None) -> GenerateResult:
        return GenerateResult(
            tokens=list(tokens), logprobs=[float(np.float32(-1 / (3 + token))) for token in tokens],
            weight_versions=np.arange(len(tokens), dtype=np.int32), finish_reason="abort", routed_experts=experts,
            cached_tokens=7, num_retries=2, counts={"num_draft_tokens": 1},
        )  # fmt: skip

    experts = np.arange(2 * 3 * 2, dtype=np.int16).reshape(2, 3, 2)
    turns = {
        "a/0": [LoggedTurn(key="x", answers=[answer([5, 6], experts), answer([], None)])],
        "a/1": [LoggedTurn(key="y", answers=[answer([9], None)], is_whole=True), LoggedTurn(key="z")],
    }
    write_turns(tmp_path, turns)
    found = read_turns(tmp_path)
    assert list(found) == list(turns)
    for before, after in zip([*turns["a/0"], *turns["a/1"]], [*found["a/0"], *found["a/1"]], strict=True):
        assert (before.key, before.is_whole, len(before.answers)) == (after.key, after.is_whole, len(after.answers))
        for one, other in zip(before.answers, after.answers, strict=True):
            for name, value in vars(one).items():
                if isinstance(value, np.ndarray):
                    assert value.dtype == getattr(other, name).dtype
                    np.testing.assert_array_equal(value, getattr(other, name))
                else:
                    assert value == getattr(other, name)
    (tmp_path / "other").mkdir()
    assert read_turns(tmp_path / "other") == {}
