"""Episodes of several roles: who is told what, who plays, and what the algorithm makes of them."""

import asyncio
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from scripted_episode import CHAT, END, TOKENIZER, ScriptedEngine, played, runner_of

from slimrl.agent.environment import Environment, Observation, Turn
from slimrl.agent.preview import preview_episode
from slimrl.agent.roles.debate import Debate
from slimrl.agent.roles.endpoint import Endpoint
from slimrl.agent.roles.player import load_players, refuse_unknown_players
from slimrl.agent.roles.writer_critic import WriterCritic
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox, ToolsUnavailable
from slimrl.algorithms.selection import select
from slimrl.algorithms.shaping import shape_rewards
from slimrl.config.agent_rules import agent_violations
from slimrl.config.schema.agent import AgentConfig, IsolationMode, PlayerConfig, RoleConfig
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.credit import OverlongConfig
from slimrl.config.schema.data import TruncationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.packing import pack
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.data.trajectory import Status, Trajectory, from_json, to_json
from slimrl.rewards.environment import role_returns
from slimrl.rewards.math import boxed_equivalent
from slimrl.rewards.scoring import Score, score
from slimrl.rewards.texts import own_texts
from slimrl.rollout.task.environment import declared_roles, load_environment
from slimrl.runtime.past_versions import against_past

pytestmark = pytest.mark.integration

PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": "Bid."}], label=None)


class Auction(Environment):
    """Two roles bid in turn; a bid that is not higher ends it and loses 1 to the other role."""

    async def start(self, prompt, *, seed, scratch):
        self._highest, self._turn = 0, 0
        return Observation(messages=[*prompt.messages, user("You are left.")], role="left", state_id="0")

    async def step(self, turn: Turn) -> Observation:
        role, other = ("left", "right") if self._turn % 2 == 0 else ("right", "left")
        self._turn += 1
        bid = int(turn.text)
        if bid <= self._highest:
            return Observation(done=True, role=other, role_rewards={role: -1.0, other: 1.0}, state_id="end")
        self._highest = bid
        told = f"{role} bids {bid}."
        messages = [user(told)] if self._turn > 1 else [user("Bid."), user(f"You are right. {told}")]
        return Observation(messages=messages, role=other, state_id=str(bid), role_rewards={role: 0.25})

    async def close(self) -> None:
        pass


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def auction(*bids: int, prompt: Prompt = PROMPT, name: str = "t", **agent) -> Trajectory:
    settings = AgentConfig(environment="tests:Auction", **agent)
    runner = runner_of(*(f"{bid}{END}" for bid in bids), environment=Auction, agent=settings)
    object.__setattr__(runner, "players", load_players(settings.players))
    return asyncio.run(played(runner, prompt, name))


def sampled(segment, turn: int) -> str:
    return TOKENIZER.decode(segment.tokens[segment.loss_mask & (segment.turn_ids == turn)])


def test_each_role_has_a_conversation_of_its_own():
    trajectory = auction(3, 5, 8, 8)
    assert trajectory.status is Status.completed
    left, right = trajectory.segments
    assert [left.role, right.role] == ["left", "right"]
    # Turns are numbered through both.
    assert [sampled(left, turn) for turn in range(4)] == [f"3{END}", "", f"8{END}", ""]
    assert [sampled(right, turn) for turn in range(4)] == ["", f"5{END}", "", f"8{END}"]
    for role, segment, told in (
        ("left", left, [user("Bid."), user("You are left."), said("3"), user("right bids 5."), said("8")]),
        (
            "right",
            right,
            [user("Bid."), user("You are right. left bids 3."), said("5"), user("left bids 8."), said("8")],
        ),
    ):
        own = [message for message in trajectory.messages if message["conversation"] == role]
        assert [{key: one[key] for key in ("role", "content")} for one in own] == told
        # Its tokens are those that the chat template writes of these messages.
        whole = CHAT.template.decode(segment.tokens.tolist())
        assert whole == CHAT.template.decode(CHAT.prompt(told[:-1], ()).tokens) + f"8{END}"
    assert trajectory.metadata["num_turns"] == 4
    assert trajectory.metadata["environment"]["states"] == ["0", "3", "5", "8"]
    assert trajectory.metadata["environment"]["role_rewards"] == {"left": 1.5, "right": -0.75}
    assert {role: facts["train"] for role, facts in trajectory.metadata["roles"].items()} == {
        "left": True,
        "right": True,
    }
    trajectory.reward, trajectory.role_rewards = 0.0, {"left": 0.5, "right": -0.5}
    assert to_json(from_json(json.loads(json.dumps(to_json(trajectory))))) == to_json(trajectory)


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_tokens_and_turns_are_limited_over_all_roles():
    runner = runner_of(*(f"{bid}{END}" for bid in range(1, 60)), environment=Auction, agent=AgentConfig())
    runner.rollout.max_turns = 5
    trajectory = asyncio.run(played(runner))
    assert (trajectory.status, trajectory.metadata["num_turns"]) == (Status.truncated, 5)
    runner = runner_of(*(f"{bid}{END}" for bid in range(1, 60)), environment=Auction, agent=AgentConfig())
    runner.rollout.max_trajectory_tokens = trajectory.num_tokens - 5
    shorter = asyncio.run(played(runner))
    assert (shorter.status, shorter.metadata["num_turns"]) == (Status.truncated, 4)
    assert shorter.num_tokens <= runner.rollout.max_trajectory_tokens


class Higher:
    """Bids by so much more than what it was told last."""

    def __init__(self, by: int) -> None:
        self._by = by

    def __call__(self, messages, *, tools, seed):
        return str(int(messages[-1]["content"].rstrip(".").rpartition(" ")[2]) + self._by)


def test_a_script_plays_a_role_and_nothing_of_it_is_trained():
    settings = {
        "players": {"bold": PlayerConfig(function="integration.test_roles:Higher", args={"by": 10})},
        "roles": {"right": RoleConfig(player="bold")},
    }
    trajectory = auction(3, 20, 20, **settings)
    (segment,) = trajectory.segments
    assert segment.role == "left"
    assert [message["content"] for message in trajectory.messages if message["conversation"] == "right"] == [
        "Bid.", "You are right. left bids 3.", "13", "left bids 20.", "30",
    ]  # fmt: skip
    assert trajectory.metadata["roles"]["right"] == {"player": "bold", "train": False, "num_prompt_messages": 2}
    asyncio.run(score(trajectory, PROMPT, role_returns, 5.0))
    assert trajectory.role_rewards == {"left": -0.5}
    assert trajectory.reward == -0.5


class OldEngine(ScriptedEngine):
    """Weights of step 30, which are asked for the right role's turns."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.requests, self.closed = [], []

    async def generate(self, request):
        self.requests.append(request)
        result = await super().generate(request)
        return replace(result, weight_versions=np.full(len(result.tokens), 30, np.int32), num_retries=1)

    def close(self, session_id):
        self.closed.append(session_id)


def test_an_older_version_plays_a_role_reads_what_the_policy_would_read_and_is_not_trained():
    agent = AgentConfig(environment="tests:Auction", roles={"right": RoleConfig(player="past")})
    past = OldEngine(f"5{END}", f"8{END}")
    runner = runner_of(f"3{END}", f"8{END}", environment=Auction, agent=agent)
    object.__setattr__(runner, "past", past)
    trajectory = asyncio.run(played(runner, PROMPT))
    itself = auction(3, 5, 8, 8)
    assert trajectory.messages == itself.messages
    # Its contexts and seeds are those of the policy in the role.
    of_right = itself.segments[1]
    for request, turn in zip(past.requests, (1, 3), strict=True):
        begin = int(np.flatnonzero(of_right.loss_mask & (of_right.turn_ids == turn))[0])
        assert request.input_ids == of_right.tokens[:begin].tolist()
    assert len({request.seed for request in past.requests}) == 2
    assert past.closed == ["t"]
    # Counts are those of the policy.
    assert trajectory.metadata["num_retries"] == 0
    (segment,) = trajectory.segments
    assert (segment.role, segment.tokens.tolist()) == ("left", itself.segments[0].tokens.tolist())
    assert trajectory.metadata["roles"]["right"] == {
        "player": "past", "train": False, "num_prompt_messages": 2, "version": 30,
    }  # fmt: skip
    assert against_past(trajectory) == 1.0
    asyncio.run(score(trajectory, PROMPT, role_returns, 5.0))
    assert trajectory.role_rewards == {"left": 1.5}
    # The limit is of all tokens, as if the policy played both.
    limited = runner_of(f"3{END}", f"8{END}", environment=Auction, agent=agent)
    object.__setattr__(limited, "past", OldEngine(f"5{END}", f"8{END}"))
    limited.rollout.max_trajectory_tokens = itself.num_tokens - 5
    assert asyncio.run(played(limited, PROMPT)).status is Status.truncated
    alone = runner_of(f"3{END}", environment=Auction, agent=agent)
    assert "no engine plays older versions" in asyncio.run(played(alone, PROMPT)).metadata["error"]


def test_a_prompt_says_who_plays_and_the_other_seat_is_trained():
    players = {"bold": PlayerConfig(function="integration.test_roles:Higher", args={"by": 10})}
    prompt = Prompt(
        prompt_id="p:2", messages=PROMPT.messages, label=None, metadata={"players": {"right": "policy", "left": "bold"}}
    )
    # left must bid first, on "You are left.", which is no number.
    lost = auction(20, prompt=prompt, players=players)
    assert lost.status is Status.failed
    assert "the player bold raised ValueError" in lost.metadata["error"]
    unknown = Prompt(prompt_id="p:3", messages=PROMPT.messages, label=None, metadata={"players": {"right": "bald"}})
    failed = auction(20, prompt=unknown)
    assert "`players` names bald, which agent.players has not" in failed.metadata["error"]


def test_a_model_behind_an_endpoint_plays_a_role():
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        message = {"role": "assistant", "content": str(10 * len(asked))}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    async def run() -> Trajectory:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/models", models)
        server = web.AppRunner(app)
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        port = server.addresses[0][1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", "frozen", options={"temperature": 0.5}, retries=0)
        agent = AgentConfig(roles={"right": RoleConfig(player="frozen")})
        runner = runner_of(f"3{END}", f"15{END}", f"15{END}", environment=Auction, agent=agent)
        object.__setattr__(runner, "players", {"frozen": endpoint})
        await runner.start()
        try:
            return await played(runner)
        finally:
            await runner.stop()
            await server.cleanup()

    trajectory = asyncio.run(run())
    assert trajectory.status is Status.completed
    assert [body["messages"][-1]["content"] for body in asked] == ["You are right. left bids 3.", "left bids 15."]
    assert asked[0]["temperature"] == 0.5
    assert asked[0]["seed"] != asked[1]["seed"]


def scored(name: str, bids: list[int], **rewards: float) -> Trajectory:
    trajectory = auction(*bids, name=name)
    by_role = lambda trajectory, prompt: Score(reward=0.0, by_role=rewards)  # noqa: E731
    asyncio.run(score(trajectory, PROMPT, by_role, 5.0))
    return trajectory


def alone(trajectory: Trajectory, role: str, reward: float) -> Trajectory:
    """A trajectory of one role, made by hand."""
    (segment,) = [one for one in trajectory.segments if one.role == role]
    return Trajectory(
        group_id=role, trajectory_id=f"{trajectory.trajectory_id}/{role}", segments=[segment], status=Status.completed,
        reward=reward, metadata={"num_turns": 4},
    )  # fmt: skip


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_an_update_of_two_roles_is_that_of_two_trajectories_each_with_the_baseline_of_its_role(advantage):
    rewards = [(1.0, 0.0), (0.0, 0.5), (1.0, 0.25)]
    games = [scored(f"t{n}", [3, 5 + n, 8 + n, 8], left=a, right=b) for n, (a, b) in enumerate(rewards)]
    algorithm = AlgorithmConfig(advantage=advantage)
    both = select(games, algorithm, lambda group: True, step=1)
    by_hand = [
        alone(game, role, reward)
        for game, pair in zip(games, rewards, strict=True)
        for role, reward in zip(("left", "right"), pair, strict=True)
    ]
    single = select(by_hand, algorithm, lambda group: True, step=1)
    means = np.mean(rewards, axis=0)
    signs = [np.sign(reward - means[n]) for pair in rewards for n, reward in enumerate(pair)]
    assert np.sign(both.advantages).tolist() == signs
    np.testing.assert_array_equal(both.advantages, single.advantages)
    assert both.num_groups == 2

    def packed(selection):
        segments = [one.segments for one in selection.trajectories]
        return pack(segments, selection.advantages, budget_tokens=4096, alignment=1, data_parallel=1)

    for got, expected in zip(packed(both)[0], packed(single)[0], strict=True):
        for name, value in vars(expected).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(got, name), value, err_msg=name)
    # The ratio of a sequence is over the tokens of a role.
    assert [one.num_sampled_tokens for one in both.trajectories] == [
        int(segment.loss_mask.sum()) for game in games for segment in game.segments
    ]


def test_values_of_turns_go_to_the_role_whose_turns_they_are():
    games = [scored(f"t{n}", [3, 5, 8, 8], left=1.0, right=float(n)) for n in range(2)]
    for game in games:
        game.turn_rewards, game.turn_states = [0.0, 1.0, 2.0, 3.0], ["a", "b", "c", "d"]
    left, right, *_ = select(games, AlgorithmConfig(), lambda group: True, step=1).trajectories
    assert (left.turn_rewards, left.turn_states) == ([0.0, 2.0], ["a", "c"])
    assert (right.turn_rewards, right.turn_states) == ([1.0, 3.0], ["b", "d"])
    for own in (left, right):
        (segment,) = own.segments
        assert own.num_turns == 2
        assert [sorted(set(segment.turn_ids[segment.loss_mask].tolist()))] == [[0, 1]]
        assert segment.turn_ids[0] == -1
        # What a role is told between its turns belongs to the turn before.
        between = segment.turn_ids[np.flatnonzero(segment.loss_mask)[-1] - 5]
        assert between in (0, 1)


def test_a_role_that_spoke_in_one_trajectory_alone_has_nothing_to_compare_with():
    games = [scored(f"t{n}", [3, 5 + n, 8 + n, 8], left=float(n), right=float(n)) for n in range(2)]
    # The left role's first bid ends it.
    games.append(auction(0, name="t2"))
    asyncio.run(score(games[2], PROMPT, role_returns, 5.0))
    assert list(games[2].role_rewards) == ["left"]
    both = select(games, AlgorithmConfig(), lambda group: True, step=1)
    assert [one.trajectory_id for one in both.trajectories] == [
        "t0 left", "t0 right", "t1 left", "t1 right", "t2 left"
    ]  # fmt: skip
    left_alone = select(games[1:], AlgorithmConfig(), lambda group: True, step=1)
    assert [one.trajectory_id for one in left_alone.trajectories] == ["t1 left", "t2 left"]
    assert left_alone.num_groups == 1
    given = select(games[1:], AlgorithmConfig(advantage="reward"), lambda group: True, step=1)
    assert len(given.trajectories) == 3


def test_a_role_that_is_not_trained_has_no_part_in_an_update():
    roles = {"right": RoleConfig(train=False)}
    games = [auction(3, 5 + n, 8 + n, 8, name=f"t{n}", roles=roles) for n in range(2)]
    for number, game in enumerate(games):
        asyncio.run(score(game, PROMPT, lambda *_, number=number: float(number), 5.0))
        assert game.role_rewards == {"left": float(number)}
        assert len(game.segments) == 2
    selection = select(games, AlgorithmConfig(), lambda group: True, step=1)
    assert [one.segments[0].role for one in selection.trajectories] == ["left", "left"]


def test_a_rule_for_truncated_trajectories_holds_for_each_role():
    game = scored("t", [3, 5, 8, 8], left=1.0, right=-1.0)
    game.status = Status.truncated
    overlong = OverlongConfig(max_tokens=2, buffer_tokens=1, penalty=0.5)
    shape_rewards([game], AlgorithmConfig(truncated=TruncationMode.zero, overlong=overlong))
    assert game.role_rewards == {"left": -0.5, "right": -1.5}


class Named(Auction):
    ROLES = ("left", "right")


def test_a_role_that_an_environment_has_not_is_refused_before_the_start():
    agent = AgentConfig(environment="integration.test_roles:Named", roles={"lefft": RoleConfig(train=False)})
    with pytest.raises(ValueError, match="has no role lefft; it has left, right"):
        load_environment(Recipe(agent=agent), ToolBox([]), SandboxPool(agent.sandbox))
    agent.environment_isolation = IsolationMode.process
    with pytest.raises(ValueError, match="has no role lefft; it has left, right"):
        load_environment(Recipe(agent=agent), ToolBox([]), SandboxPool(agent.sandbox))


@pytest.mark.parametrize("isolation", [IsolationMode.loop, IsolationMode.process])
def test_roles_and_players_of_prompts_that_there_are_not_are_refused_with_their_lines(isolation, tmp_path):
    agent = AgentConfig(environment="integration.test_roles:Named", environment_isolation=isolation)
    roles = declared_roles(agent, load_environment(Recipe(agent=agent), ToolBox([]), SandboxPool(agent.sandbox)))
    lines = [
        {"prompt": "a", "label": "", "metadata": {"players": {"left": "policy", "right": "past"}}},
        {"prompt": "b", "label": "", "metadata": {"players": {"lefft": "policy"}}},
        {"prompt": "c", "label": "", "metadata": {"players": {"right": "bold"}}},
    ]
    file = tmp_path / "bids.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert refuse_unknown_players(read_prompts(file), agent, roles) == [
        f"{file}:2: metadata.players.lefft: integration.test_roles:Named has no role lefft; it has left, right. Did "
        "you mean left?",
        f"{file}:3: metadata.players.right is 'bold'; there are policy.",
    ]
    # A class that says nothing of its roles may have any, and other tasks may have something else of that name.
    assert refuse_unknown_players(read_prompts(file), agent, ()) == []


def test_a_reward_of_a_role_that_there_is_not_fails_the_trajectory_and_says_which_there_are():
    def pay(*roles: str, **paid: float) -> Trajectory:
        trajectory = auction(3, 2) if "right" in paid else auction(0)
        function = lambda trajectory, prompt: Score(reward=0.5, by_role=paid)  # noqa: E731
        asyncio.run(score(trajectory, PROMPT, function, 5.0, roles))
        return trajectory

    assert pay(left=1.0, right=-1.0).role_rewards == {"left": 1.0, "right": -1.0}
    with pytest.raises(ValueError, match=r"by_role names lefft, and the episode has left, right\. Did you mean left\?"):
        pay(lefft=1.0, right=-1.0)
    # The first bid of 0 lost before the other role was asked.
    with pytest.raises(ValueError, match=r"by_role names rigt, .* If an episode may end .* name it in ROLES"):
        pay(left=-1.0, rigt=1.0)
    assert pay("left", "rigt", left=-1.0, rigt=1.0).role_rewards == {"left": -1.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"players": {"policy": PlayerConfig(function="a:b")}, "environment": "a:B"}, "the model that is trained"),
        ({"roles": {"left": RoleConfig(player="bald")}, "environment": "a:B"}, "'bald' is neither policy nor one of"),
        ({"roles": {"left": RoleConfig()}}, "neither an agent.environment nor an agent behind the gateway"),
        ({"players": {"bold": PlayerConfig(function="a:b")}}, "no agent.environment with roles"),
        (
            {"players": {"past": PlayerConfig(function="a:b")}, "environment": "a:B"},
            "older versions of the policy. Use",
        ),
        ({"roles": {"left": RoleConfig(player="past")}, "environment": "a:B"}, "Set agent.past_versions.every_steps"),
    ],
)
def test_settings_of_roles_that_mean_nothing_are_refused(settings, said):
    assert [message for _, message in agent_violations(Recipe(agent=AgentConfig(**settings))) if said in message]


QUESTION = Prompt(prompt_id="q:1", messages=[user("How much is 2 + 2?")], label="4", metadata={"answers": ["4", "5"]})


def debated(*texts: str, seed: int = 1) -> Trajectory:
    runner = runner_of(*(text + END for text in texts), environment=lambda: Debate(rounds=1), agent=AgentConfig())
    sampling = SamplingConfig(max_new_tokens=1000)
    return asyncio.run(runner.run(QUESTION, trajectory_id="t", sampling=sampling, seed=seed))


def test_a_debate_pays_the_side_whose_answer_is_chosen_and_a_judge_who_is_right():
    sides = set()
    for seed in range(6):
        for verdict in "AB":
            game = debated("I say so.", "No.", f"Hm.\nVERDICT: {verdict}", seed=seed)
            asked = {role: [m["content"] for m in game.messages if m["conversation"] == role] for role in Debate.ROLES}
            shown = dict(line.split(": ") for line in asked["judge"][0].splitlines() if line.startswith("Answer "))
            assert f"the answer is {shown['Answer A']} and not {shown['Answer B']}" in asked["side_a"][0]
            assert f"the answer is {shown['Answer B']} and not {shown['Answer A']}" in asked["side_b"][0]
            assert "For answer A: I say so." in asked["side_b"][0]
            assert "For answer A: I say so.\n\nFor answer B: No." in asked["judge"][0]
            right = shown[f"Answer {verdict}"] == "4"
            chosen, other = ("side_a", "side_b") if verdict == "A" else ("side_b", "side_a")
            paid = game.metadata["environment"]["role_rewards"]
            assert paid == {chosen: 1.0, other: -1.0, "judge": float(right)}
            sides.add(shown["Answer A"])
    assert sides == {"4", "5"}, "positions are swapped"
    undecided = debated("I say so.", "No.", "VERDICT: A or VERDICT: B, who knows")
    assert undecided.metadata["environment"]["role_rewards"] == {"side_a": 0.0, "side_b": 0.0, "judge": 0.0}


@pytest.mark.parametrize(
    ("draft", "answer", "paid"),
    [
        ("\\boxed{5}", "\\boxed{4}", {"writer": 1.0, "critic": 2.0}),
        ("\\boxed{4}", "\\boxed{4}", {"writer": 1.0, "critic": 1.0}),
        ("\\boxed{4}", "\\boxed{5}", {"writer": 0.0, "critic": -1.0}),
        ("\\boxed{5}", "four", {"writer": 0.0, "critic": 0.0}),
    ],
)
def test_a_critic_is_paid_for_the_answer_and_for_what_it_changed(draft: str, answer: str, paid: dict):
    texts = [text + END for text in (draft, "Think again.", answer)]
    runner = runner_of(*texts, environment=WriterCritic, agent=AgentConfig())
    game = asyncio.run(played(runner, QUESTION))
    assert game.metadata["environment"]["role_rewards"] == paid
    told = {role: [m["content"] for m in game.messages if m["conversation"] == role] for role in WriterCritic.ROLES}
    assert draft in told["critic"][0]
    assert "A reader says:\nThink again." in told["writer"][2]
    asyncio.run(score(game, QUESTION, role_returns, 5.0))
    assert game.role_rewards == paid


class Forgetful(Auction):
    """Names no role after the start."""

    async def step(self, turn: Turn) -> Observation:
        return replace(await super().step(turn), role="")


class Spaced(Auction):
    async def start(self, prompt, *, seed, scratch):
        return replace(await super().start(prompt, seed=seed, scratch=scratch), role="the left one")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Forgetful, "the roles 'left' and then ''; all must name one, or none"),
        (Spaced, "role must be letters, digits, '.', '_' and '-', 64 at most, not 'the left one'"),
    ],
)
def test_roles_that_are_missing_or_no_names_fail_the_trajectory(environment, said):
    agent = AgentConfig(environment="tests:Auction")
    trajectory = asyncio.run(played(runner_of(f"3{END}", f"5{END}", environment=environment, agent=agent), PROMPT))
    assert trajectory.status is Status.failed
    assert said in trajectory.metadata["error"]


def test_players_of_a_prompt_that_are_no_object_fail_the_trajectory():
    prompt = Prompt(prompt_id="p:2", messages=PROMPT.messages, label=None, metadata={"players": ["Ann", "Bob"]})
    assert "not an object of names by role" in auction(3, prompt=prompt).metadata["error"]


class Opened:
    """A player with a start and a close, either of which may fail."""

    def __init__(self, log: list[str], name: str, *, fails: str = "") -> None:
        self._log, self._name, self._fails = log, name, fails

    async def start(self) -> None:
        await self._do("start")

    async def close(self) -> None:
        await self._do("close")

    async def _do(self, what: str) -> None:
        self._log.append(f"{what} {self._name}")
        if self._fails == what:
            raise RuntimeError("no")


async def test_a_player_that_does_not_start_is_named_and_those_that_were_opened_are_closed():
    log: list[str] = []
    runner = runner_of(environment=Auction)
    players = {"a": Opened(log, "a", fails="close"), "b": Opened(log, "b", fails="start"), "c": Opened(log, "c")}
    object.__setattr__(runner, "players", players)
    with pytest.raises(ToolsUnavailable, match=r"agent\.players\.b: start failed: RuntimeError"):
        await runner.start()
    await runner.stop()
    assert log == ["start a", "start b", "close b", "close a"]


def test_a_player_that_blocks_holds_up_nobody_and_one_that_exits_fails_its_trajectory_alone():
    def sleeps(messages, *, tools, seed):
        time.sleep(0.5)
        return "4"

    def leaves(messages, *, tools, seed):
        raise SystemExit(3)

    async def game(player):
        agent = AgentConfig(environment="tests:Auction", roles={"right": RoleConfig(player="script")})
        runner = runner_of(f"3{END}", f"4{END}", environment=Auction, agent=agent)
        object.__setattr__(runner, "players", {"script": player})
        return await played(runner)

    async def run():
        playing = asyncio.create_task(game(sleeps))
        longest = 0.0
        while not playing.done():
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        return (await playing).status, longest, (await game(leaves)).metadata["error"]

    status, longest, error = asyncio.run(run())
    assert (status, longest < 0.4) == (Status.completed, True)
    assert "the player script raised" in error


def test_a_file_without_the_reward_of_a_trained_role_is_refused():
    value = to_json(scored("t", [3, 5, 8, 8], left=1.0, right=0.0))
    assert from_json(value).role_rewards == {"left": 1.0, "right": 0.0}
    del value["role_rewards"]["right"]
    with pytest.raises(ValueError, match="`role_rewards` must have right"):
        from_json(value)
    with pytest.raises(ValueError, match="left` must be an object whose `train` is true or false"):
        from_json({**value, "metadata": {**value["metadata"], "roles": {"left": {}}}})


def test_rewards_that_read_one_conversation_refuse_several():
    game = auction(3, 5, 8, 8)
    for reward in (boxed_equivalent, unboxed):
        with pytest.raises(ValueError, match="each role has its own"):
            asyncio.run(score(game, replace(PROMPT, label="8"), reward, 5.0))
    without = replace(game, metadata={**game.metadata})
    del without.metadata["roles"]
    with pytest.raises(ValueError, match="has no roles that could be paid; use environment_return"):
        role_returns(without, PROMPT)


def unboxed(trajectory: Trajectory, prompt: Prompt) -> float:
    return float(own_texts(trajectory)[-1] == "8")


def test_the_preview_of_an_episode_shows_the_role_that_begins_whoever_plays_it():
    prompt = Prompt(prompt_id="p:2", messages=PROMPT.messages, label=None, metadata={"players": {"left": "frozen"}})
    runner = runner_of(environment=Auction)
    preview = preview_episode(runner.dialogues, Auction, runner.rollout, AgentConfig(environment="a:B"), prompt)
    (segment,) = asyncio.run(preview).segments
    assert "You are left." in "".join(token.text for token in segment)
