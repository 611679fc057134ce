"""Scores of a teacher: what is asked of an engine, what a rollout makes of the answers, and what is refused before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.rollout import RolloutMode
from slimrl.config.teacher import teacher_recipe
from slimrl.data.engine import EngineError, ScoreRequest
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.engines import retries
from slimrl.engines import teacher as teacher_module
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.ports import free_ports
from slimrl.engines.teacher import ScoringTimes, Teacher
from slimrl.observability.metrics import is_metric
from slimrl.rewards.loading import Rewards
from slimrl.rollout.groups import Group
from slimrl.rollout.slots import Slots
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.statistics import teacher_metrics


class Server:
    """Scores the token at position t with -t / 10; `script` has what it does with the next requests instead."""

    def __init__(self) -> None:
        self.script: list[int | str | list] = []
        self.asked: list[dict] = []
        self.aborted: list[str] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        action = self.script.pop(0) if self.script else "answer"
        if isinstance(action, int):
            return web.json_response({"error": {"message": "not now"}}, status=action)
        if action == "hang":
            await asyncio.sleep(60)
        start, tokens = body["logprob_start_len"], body["input_ids"]
        pairs = [[None if t == start else -t / 10, tokens[t], None] for t in range(start, len(tokens))]
        meta = {"finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": pairs}
        if action == "abort":
            meta = {"finish_reason": {"type": "abort", "message": "no memory"}}
        return web.json_response(
            {"meta_info": meta | ({"input_token_logprobs": action} if isinstance(action, list) else {})}
        )

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01, 0.02, 0.03))
    there, app = Server(), web.Application()
    app.router.add_post("/generate", there.generate)
    app.router.add_post("/abort_request", there.abort)
    async with TestServer(app) as running:
        there.url = str(running.make_url("")).rstrip("/")
        yield there


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[SglangEngine]:
    made = SglangEngine(server.url, vocab_size=100)
    yield made
    await made.aclose()


def ask(start: int = 3, timeout_s: float = 20.0) -> ScoreRequest:
    return ScoreRequest(session_id="a/0", tokens=[5, 6, 7, 8, 9], start=start, timeout_s=timeout_s)


async def test_a_score_is_one_prefill_without_new_tokens_from_before_the_first_token(server: Server, engine):
    scores = await engine.score(ask())
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [-0.3, -0.4], rtol=1e-6)
    (body,) = server.asked
    assert body.pop("rid")
    assert body == {
        "input_ids": [5, 6, 7, 8, 9],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 2,
    }
    assert len(await engine.score(ask(start=1))) == 4


async def test_a_score_is_asked_again_as_turns_are_and_aborted_when_it_is_late(server: Server, engine):
    server.script = [503, 500]
    made = trajectory(segment([5, 6, 7, 8, 9], [3, 4]), name="a/0")
    await Teacher([engine], slots_per_engine=1, timeout_s=20.0).score(made)
    assert made.segments[0].teacher_logprobs.tolist() == np.float32([0, 0, 0, -0.3, -0.4]).tolist()
    assert len({body["rid"] for body in server.asked}) == 3
    server.script = ["hang"]
    with pytest.raises(EngineError, match=r"a/0, segment 0: no answer within 0\.1 s"):
        await Teacher([engine], slots_per_engine=1, timeout_s=0.1).score(made)
    await engine.aclose()
    assert server.aborted == [server.asked[-1]["rid"]]
    (port,) = free_ports(1)
    nobody = SglangEngine(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineError, match="Cannot connect"):
        await Teacher([nobody], slots_per_engine=1, timeout_s=20.0).score(made)
    await nobody.aclose()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (400, "400 .*not now"),
        ("abort", "aborted: no memory"),
        ([[None, 7, None], [-1.0, 8, None]], "1 log-probs of 2 tokens"),
        ([[None, 7, None], [None, 8, None], [-1.0, 9, None]], "not finite"),
        ([], "not enough values"),
    ],
)
async def test_an_answer_that_scores_something_else_is_an_error(server: Server, engine, action, message):
    server.script = [action]
    with pytest.raises(EngineError, match=message):
        await engine.score(ask())


async def test_a_token_outside_of_the_vocabulary_is_not_sent(server: Server, engine):
    request = ScoreRequest(session_id="s", tokens=[1, 100], start=1, timeout_s=1.0)
    with pytest.raises(EngineError, match="token 100 is outside of the vocabulary"):
        await engine.score(request)
    assert server.asked == []


class Scores:
    """An engine whose log-prob of a token is minus its id; counts how many requests it serves at once."""

    def __init__(self, takes_s: float = 0.0, fails_at: int | None = None) -> None:
        self.takes_s, self.fails_at = takes_s, fails_at
        self.asked: list[ScoreRequest] = []
        self.now = self.most = 0
        self.closed = False

    async def score(self, request: ScoreRequest) -> np.ndarray:
        number = len(self.asked)
        self.asked.append(request)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.takes_s)
        self.now -= 1
        if number == self.fails_at:
            raise EngineError("teacher 0: gone")
        return -np.array(request.tokens[request.start :], np.float32)

    async def aclose(self) -> None:
        self.closed = True


def segment(tokens: list[int], sampled: list[int], logprob: float = 0.0) -> Segment:
    made = Segment.not_sampled(tokens, [position in sampled for position in range(len(tokens))])
    made.rollout_logprobs = np.where(made.loss_mask, logprob, 0).astype(np.float32)
    return made


def trajectory(*segments: Segment, name: str = "t", status: Status = Status.completed) -> Trajectory:
    return Trajectory(group_id="g", trajectory_id=name, segments=list(segments), status=status)


async def test_a_segment_is_asked_for_from_its_first_to_its_last_sampled_token():
    engine = Scores()
    made = trajectory(segment([10, 11, 12, 13, 14, 15], [2, 4]), segment([1, 2], []), segment([3, 4], [1]))
    await Teacher([engine], slots_per_engine=4, timeout_s=7.0).score(made)
    assert [(r.tokens, r.start, r.timeout_s) for r in engine.asked] == [
        ([10, 11, 12, 13, 14], 2, 7.0),
        ([3, 4], 1, 7.0),
    ]
    assert [s.teacher_logprobs.tolist() for s in made.segments] == [[0, 0, -12, 0, -14, 0], [0, 0], [0, -4]]
    assert {s.teacher_logprobs.dtype for s in made.segments} == {np.dtype(np.float32)}


async def test_engines_share_the_requests_each_with_at_most_so_many():
    engines = [Scores(0.002), Scores(0.002), Scores(0.002)]
    teacher = Teacher(engines, slots_per_engine=2, timeout_s=1.0)
    await asyncio.gather(*(teacher.score(trajectory(segment([1, 2], [1]))) for _ in range(30)))
    assert [engine.most for engine in engines] == [2, 2, 2]
    assert sum(len(engine.asked) for engine in engines) == 30
    await teacher.aclose()
    assert all(engine.closed for engine in engines)


async def test_a_trajectory_with_a_segment_that_fails_has_no_scores_and_leaves_its_slots():
    engine = Scores(fails_at=1)
    teacher = Teacher([engine], slots_per_engine=1, timeout_s=1.0)
    made = trajectory(*(segment([1, 2], [1]) for _ in range(3)))
    with pytest.raises(EngineError, match="gone"):
        await teacher.score(made)
    assert [s.teacher_logprobs for s in made.segments] == [None] * 3
    await asyncio.wait_for(teacher.score(made), 1.0)
    with pytest.raises(EngineError, match="t, segment 0: its first token was sampled"):
        await teacher.score(trajectory(segment([1, 2], [0])))


async def test_a_request_that_fails_while_an_engine_is_restarted_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(teacher_module, "RESTART_POLL_S", 0.01)
    engine, looks = Scores(fails_at=0), iter([True, True, True, False])
    teacher = Teacher(
        [engine], slots_per_engine=1, timeout_s=1.0, is_restarting=lambda: next(looks), restart_timeout_s=5.0
    )
    made = trajectory(segment([1, 2], [1]))
    await teacher.score(made)
    assert made.segments[0].teacher_logprobs is not None
    assert len(engine.asked) == 2
    late = Teacher(
        [Scores(fails_at=0)], slots_per_engine=1, timeout_s=1.0, is_restarting=lambda: True, restart_timeout_s=0.05
    )
    with pytest.raises(EngineError, match=r"gone; it was not restarted within 0\.05 s"):
        await late.score(made)


class Stage:
    """Engine, runner of episodes and display at once. Episodes end in the order of their names' reverse."""

    def __init__(self, endings: dict[int, Status]) -> None:
        self.endings, self.count, self.ended = endings, 0, 0

    async def start(self):
        pass

    async def stop(self):
        pass

    def open(self, session_ids, *, at_once):
        self.count = 0

    def close(self, session_id):
        self.ended += 1

    async def aclose(self):
        pass

    async def run(self, prompt, *, trajectory_id, sampling, seed) -> Trajectory:
        number = self.count
        self.count += 1
        await asyncio.sleep(0.001 * (5 - number))
        metadata = dict.fromkeys(("num_turns", "num_tool_calls", "num_tool_errors", "num_malformed_calls"), 1)
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=trajectory_id,
            segments=[segment([3, 4 + number], [1], logprob=-1.0)],
            status=self.endings.get(number, Status.completed),
            metadata=metadata,
        )

    @contextmanager
    def phase(self, name, total, unit):
        yield SimpleNamespace(advance=lambda: None)


PROMPTS = [Prompt(prompt_id=f"p{i}", messages=[], label=i) for i in range(5)]


def stage_of(
    engine: Scores, *, endings: dict[int, Status] | None = None, mode: RolloutMode = RolloutMode.sync
) -> RolloutStage:
    recipe, parts = Recipe(), Stage(endings or {})
    recipe.rollout.samples_per_prompt, recipe.rollout.mode = 1, mode
    recipe.rollout.max_failed_fraction = 1.0
    task = SimpleNamespace(
        sandbox=SandboxPool(SandboxConfig()),
        episode_runner=lambda *_: parts,
        rewards=Rewards(function=lambda trajectory, prompt: 1.0),
        roles=(),
    )
    teacher = Teacher([engine], slots_per_engine=3, timeout_s=1.0)
    return RolloutStage(recipe, task, parts, parts, watch=lambda: None, flush_caches=lambda: None, teacher=teacher)


def test_a_rollout_is_scored_but_for_what_failed_and_an_evaluation_is_not():
    engine = Scores()
    with stage_of(engine, endings={1: Status.failed, 2: Status.truncated, 3: Status.aborted}) as stage:
        batch = stage.rollout(PROMPTS, label="step_000001")
        assert [t.segments[0].teacher_logprobs is None for t in batch] == [False, True, False, False, False]
        scored = [t.segments[0] for t in batch if t.status is not Status.failed]
        assert [float(s.teacher_logprobs[1]) for s in scored] == [-4, -6, -7, -8]
        assert (len(stage._scoring.scores_s), 0 <= sum(stage._scoring.tails_s) < 1) == (4, True)
        # A rollout that refills the step's first one adds its times.
        engine.takes_s = 0.05
        stage.rollout(PROMPTS[:1], label="step_000001/refill_1")
        stage.evaluate("heldout", PROMPTS, label="eval_000001")
        times = stage.take_scoring()
        assert (len(times.scores_s), len(times.tails_s)) == (5, 2)
        assert times.tails_s[1] >= 0.05
    assert engine.closed


def test_groups_that_run_by_themselves_have_their_times_in_the_batch_after_them():
    async def group(number: int) -> None:
        made = Group(number=number, prompt=PROMPTS[0], ids=[f"group_{number}/{sample}" for sample in range(2)])
        await stage.run_groups([made], Slots(4))

    engine = Scores()
    with stage_of(engine, mode=RolloutMode.async_) as stage:
        stage._runner.count = 0
        stage.run(group(0))
        assert len(stage.take_scoring().scores_s) == 2
        engine.takes_s = 0.05
        stage.run(group(1))
        stage.run(group(2))
        tails_s = list(stage._scoring.tails_s)
        assert len(tails_s) == 2
        assert min(tails_s) >= 0.05
        times = stage.take_scoring()
        assert (len(times.scores_s), times.tails_s) == (4, [pytest.approx(np.mean(tails_s))])
        assert stage.take_scoring() == ScoringTimes()


def test_a_trajectory_that_the_teacher_cannot_score_fails_with_the_cause():
    with stage_of(Scores(fails_at=2)) as stage:
        batch = stage.rollout(PROMPTS, label="step_000001")
    (failed,) = [t for t in batch if t.status is Status.failed]
    assert failed.metadata["error"] == "the teacher failed: teacher 0: gone"
    assert failed.segments[0].teacher_logprobs is None


def test_the_metrics_are_means_over_sampled_tokens_and_over_scored_trajectories():
    first = trajectory(segment([1, 2, 3], [1, 2], logprob=-1.0), segment([1, 2], [1], logprob=-4.0))
    first.segments[0].teacher_logprobs = np.array([0, -3.0, -1.5], np.float32)
    first.segments[1].teacher_logprobs = np.array([0, -1.0], np.float32)
    second, failed = trajectory(segment([1, 2], [])), trajectory(segment([1, 2], [1]), status=Status.failed)
    second.segments[0].teacher_logprobs = np.zeros(2, np.float32)
    found = teacher_metrics([first, second, failed], ScoringTimes(scores_s=[2.0, 1.0], tails_s=[0.25]))
    # (2 + 0.5 - 3) / 3
    assert found == pytest.approx({"distill/reverse_kl": -0.5 / 3, "distill/score_s": 1.5, "time/teacher_s": 0.25})
    assert all(map(is_metric, found))
    assert teacher_metrics([failed], ScoringTimes()) == {}
    # Scored before the run was resumed.
    assert "distill/score_s" not in teacher_metrics([first], ScoringTimes())


def test_a_teacher_s_engines_have_every_setting_that_the_teacher_and_a_rollout_both_have():
    recipe = Recipe()
    shared = {one.name for one in fields(recipe.teacher)} & {one.name for one in fields(recipe.rollout)}
    assert len(shared) >= 10
    for number, name in enumerate(sorted(shared), start=1001):
        value = {"SET": "1"} if isinstance(getattr(recipe.teacher, name), dict) else number
        setattr(recipe.teacher, name, value)
    rollout = teacher_recipe(recipe).rollout
    assert {name: getattr(rollout, name) for name in shared} == {name: getattr(recipe.teacher, name) for name in shared}


def test_a_teacher_s_engines_share_nothing_and_cache_nothing_in_a_deterministic_run():
    recipe = Recipe()
    recipe.rollout.colocated, recipe.rollout.routed_experts, recipe.rollout.max_trajectory_tokens = True, True, 512
    recipe.teacher.path, recipe.teacher.engine_tp, recipe.teacher.num_engines = "teacher", 4, 2
    recipe.teacher.sglang = {"chunked_prefill_size": 4096}
    made = teacher_recipe(recipe)
    assert not made.shares_devices
    assert (made.model.path, made.rollout.engine_tp, made.rollout.num_engines) == ("teacher", 4, 2)
    assert (made.rollout.routed_experts, made.rollout.colocated) == (False, False)
    assert made.rollout.max_trajectory_tokens == 512
    assert made.rollout.sglang == {"chunked_prefill_size": 4096}
    assert made.resync.transport is not TransportName.ipc
    recipe.deterministic = True
    assert teacher_recipe(recipe).rollout.sglang == {"chunked_prefill_size": 4096, "disable_radix_cache": True}
    # The recipe itself is left as it was.
    assert recipe.rollout.colocated
