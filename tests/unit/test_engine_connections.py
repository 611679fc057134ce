"""What goes over the wire to one engine: the settings of its routes, and the connections that carry them."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest
from engine_server import EngineServer, serving

from slimrl.config.schema.resync import PauseMode
from slimrl.data.engine import EngineError, GenerateRequest
from slimrl.data.model_weights import EngineModel, GroupSpec
from slimrl.data.peer_messages import Entry, Message, Placed
from slimrl.engines import client
from slimrl.engines.client import SglangEngine, batch_body, request_body
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.plugin.shared_rounds import plain_loads
from slimrl.engines.plugin.weight_updates import join_payload, load_payload, map_payload, receive_payload
from slimrl.engines.servers.control import EngineMemory, SglangControl


def ask(session: str = "s", tokens=(1, 2), timeout_s: float = 20.0, seed: int | None = 11) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=list(tokens), temperature=0.5, top_p=0.75, top_k=3, max_new_tokens=4,
        stop_token_ids=(), timeout_s=timeout_s, seed=seed,
    )  # fmt: skip


def test_the_body_of_a_request_and_of_a_batch_ask_for_logprobs_and_for_routing_where_it_is_compared():
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 3, "max_new_tokens": 4, "ignore_eos": True}
    sampling["sampling_seed"] = 11
    plain = {"rid": "r", "input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
    assert request_body(ask(), "r", routed_experts=False) == plain
    routed = {"return_routed_experts": True, "routed_experts_start_len": 1}
    assert request_body(replace(ask(), experts_from=1), "r", routed_experts=True) == {**plain, **routed}
    both = batch_body([ask("a"), ask("b", (7,))], ["r", "q"], routed_experts=False)
    listed = {"rid": ["r", "q"], "input_ids": [[1, 2], [7]], "sampling_params": [sampling, sampling]}
    assert both == {**listed, "return_logprob": True}


@contextmanager
def nothing_left_open() -> Iterator[None]:
    """Every session that is made inside has been closed."""
    made, original = [], client.aiohttp.ClientSession

    def session(**options):
        made.append(original(**options))
        return made[-1]

    client.aiohttp.ClientSession = session
    try:
        yield
    finally:
        client.aiohttp.ClientSession = original
    assert made
    assert all(each.closed for each in made)


@pytest.fixture
async def engines():
    """Two with their addresses."""
    made = [EngineServer(), EngineServer()]
    async with serving(*made):
        yield [(engine, engine.url) for engine in made]


async def test_what_is_late_is_aborted_and_what_is_closed_leaves_no_connection(engines):
    (there, url), (other, _) = engines
    there.slow = 60.0
    with nothing_left_open():
        engine = SglangEngine(url)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(ask()), 0.1)
        await engine.aclose()
    assert (there.aborted, other.aborted) == ([there.bodies[0]["rid"]], [])
    assert engine._aborts == set()
    # One that was never asked has nothing to close.
    await SglangEngine(url).aclose()


async def test_an_abort_of_an_engine_that_does_not_answer_has_a_deadline(engines, monkeypatch: pytest.MonkeyPatch):
    (engine, url), _ = engines
    engine.slow = 60.0
    made = []
    original = client.aiohttp.ClientTimeout
    monkeypatch.setattr(client.aiohttp, "ClientTimeout", lambda **given: made.append(given) or original(**given))
    asked = SglangEngine(url)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked.generate(ask()), 0.05)
    await asked.aclose()
    # A generation has the deadline of its caller and no other.
    assert made == [{"total": None}, {"total": 5.0}]


async def test_any_number_of_requests_is_under_way_at_once(engines):
    (engine, url), _ = engines
    engine.slow = 0.3
    asked = SglangEngine(url)
    names = [f"s{i}" for i in range(110)]
    # More than aiohttp's own limit of 100.
    await asyncio.gather(*(asked.generate(ask(name)) for name in names))
    await asked.aclose()
    assert engine.most_under_way == 110


async def test_a_token_outside_of_the_vocabulary_is_not_sent(engines):
    (engine, url), _ = engines
    asked = SglangEngine(url, vocab_size=8)
    for requests in ([ask(tokens=(1, 8, 2))], [ask(tokens=(1, 2)), ask(tokens=(9, 3))]):
        with pytest.raises(EngineError, match=r"session s.*: token [89] is outside of the vocabulary"):
            await asked.generate_batch(requests)
    assert engine.bodies == []
    assert (await asked.generate(ask(tokens=(7, 1)))).tokens == [7]
    both = await asked.generate_batch([ask("a", (5,)), ask("b", (6,))])
    assert [result.tokens for result in both] == [[5], [6]]
    await asked.aclose()
    unlimited = SglangEngine(url)
    assert (await unlimited.generate(ask(tokens=(99,)))).tokens == [99]
    await unlimited.aclose()


async def test_a_round_has_the_latest_deadline_of_its_requests(engines):
    (engine, url), _ = engines
    engine.slow = 0.2
    asked = LockstepEngine([SglangEngine(url)])
    asked.open(["a", "b"], at_once=2)
    both = [ask("a", timeout_s=0.01), ask("b", timeout_s=20.0)]
    assert len(await asyncio.gather(*map(asked.generate, both))) == 2
    late = [ask("a", timeout_s=0.05), ask("b", timeout_s=0.01)]
    answers = await asyncio.gather(*map(asked.generate, late), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["session a: no answer within 0.05 s"] * 2
    await asked.aclose()


async def test_routing_is_asked_for_where_the_client_knows_its_shape(engines):
    (engine, url), _ = engines
    # Two tokens in and one out: the last one was not read.
    experts = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2)
    engine.experts = base64.b64encode(experts.tobytes()).decode()
    asked = SglangEngine(url, routed_experts_shape=(3, 2))
    result = await asked.generate(ask())
    np.testing.assert_array_equal(result.routed_experts, experts)
    plain = SglangEngine(url)
    assert (await plain.generate(ask())).routed_experts is None
    assert ["return_routed_experts" in body for body in engine.bodies] == [True, False]
    for each in (asked, plain):
        await each.aclose()


class Wire:
    """Takes the requests of a control; answers with what `answers` has for their route, else with an empty 200."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict]] = []
        self.answers: dict[str, list[httpx.Response]] = {}
        self.timeouts: list[float] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        route = request.url.raw_path.decode().removeprefix("/")
        self.calls.append((request.method, route, json.loads(request.content or b"null")))
        self.timeouts.append(request.extensions["timeout"]["read"])
        left = self.answers.get(route)
        return left.pop(0) if left else httpx.Response(200, text="done")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made, original = Wire(), httpx.Client
    transport = httpx.MockTransport(lambda request: made.handle(request))
    monkeypatch.setattr(
        "slimrl.engines.servers.control.httpx.Client", lambda **how: original(**how, transport=transport)
    )
    return made


@pytest.fixture
def control(wire: Wire) -> Iterator[SglangControl]:
    made = SglangControl(
        "engine 2", "http://10.0.0.1:1", timeout_s=10.0, num_ranks=2, nodes=("host-a",), key=EngineKey("k")
    )
    yield made
    made.close()


GROUP = GroupSpec(name="g", address="10.0.0.1", port=1, world_size=3, backend="gloo", timeout_s=5.0)
ROUNDS = [
    (
        Message(
            source=2, target=rank, ranks=(rank,), entries=(Entry("w", "float32", ((rank, rank + 1), (0, 2))),), nbytes=8
        ),
    )
    for rank in range(2)
]
LOADS = [{EngineModel.target: [[Placed(message, 512) for message in messages], []]} for messages in ROUNDS]
PLAIN = [{"target": [[(2, rank, (rank,), [("w", "float32", ((rank, rank + 1), (0, 2)))], 8)]]} for rank in range(2)]


@pytest.mark.parametrize(
    ("act", "route", "body"),
    [
        (lambda c: c.pause(), "pause_generation", {"mode": "retract"}),
        (lambda c: c.pause(PauseMode.abort), "pause_generation", {"mode": "abort"}),
        (lambda c: c.begin_update(), "begin_weight_update", {"selector": "target"}),
        (lambda c: c.end_update(), "end_weight_update", {}),
        (lambda c: c.flush_cache(), "flush_cache", {}),
        (lambda c: c.flush_when_idle(), "flush_cache?timeout=9", {}),
        (lambda c: c.set_version(7), "update_weight_version", {"new_version": "7", "abort_all_requests": False}),
        (lambda c: c.resume(), "continue_generation", {}),
        (
            lambda c: c.load_checkpoint("/m"),
            "update_weights_from_disk",
            {"model_path": "/m", "load_format": "auto", "flush_cache": False},
        ),
        (
            lambda c: c.load_version("/v", "/local"),
            "update_weights_from_disk",
            {
                "model_path": "/v",
                "load_format": "auto",
                "flush_cache": False,
                "manifest": {"slimrl_version": {"local_dir": "/local", "timeout_s": 10.0}},
            },
        ),
        (
            lambda c: c.resume_memory([EngineMemory.weights, EngineMemory.kv_cache]),
            "resume_memory_occupation",
            {"tags": ["weights", "kv_cache"]},
        ),
        *(
            (
                act,
                "update_weights_from_tensor",
                {
                    "serialized_named_tensors": said,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                    "selector": selector,
                },
            )
            for act, said, selector in (
                (
                    lambda c: c.map_memory({3: ("s", "t")}, LOADS),
                    [map_payload(plain_loads(each), {3: ["s", "t"]}) for each in LOADS],
                    "target",
                ),
                (
                    lambda c: c.load_round(EngineModel.draft, 7, 1),
                    [load_payload(EngineModel.draft, 1, 7)] * 2,
                    "draft",
                ),
                (
                    lambda c: c.join_group(GROUP, [{EngineModel.target: [each]} for each in ROUNDS], None),
                    [join_payload(GROUP, each, None) for each in PLAIN],
                    "target",
                ),
                (
                    lambda c: c.join_group(GROUP, [{EngineModel.target: [each]} for each in ROUNDS], GROUP),
                    [join_payload(GROUP, each, GROUP) for each in PLAIN],
                    "target",
                ),
            )
        ),
    ],
)
def test_each_control_is_one_call_of_sglangs_route(wire: Wire, control: SglangControl, act, route: str, body: dict):
    act(control)
    assert wire.calls == [("POST", route, body)]
    assert wire.timeouts == [10.0]


@pytest.mark.parametrize("message", ["[16, 24]", "[16, 24] | [16, 24]"])
def test_an_engine_is_told_to_receive_and_says_what_came_to_each_rank(wire: Wire, control: SglangControl, message: str):
    for model in EngineModel:
        wire.answers["update_weights_from_tensor"] = [
            httpx.Response(200, json={"success": True, "message": message}) for _ in range(2)
        ]
        assert control.receive("g", model, 9) == [16, 24]
        _, route, body = wire.calls.pop()
        assert (route, body["selector"]) == ("update_weights_from_tensor", model.value)
        assert body["serialized_named_tensors"] == [receive_payload("g", model, 9)] * 2


def test_what_the_ranks_of_a_model_keep_is_read(wire: Wire, control: SglangControl):
    said = {"0": '{"w": [[[0, 2], [0, 4]]]}', "1": '{"w": [[[2, 4], [0, 4]]], "s": [[]]}'}
    for model, names in ((EngineModel.target, said), (EngineModel.draft, {f"draft.{k}": v for k, v in said.items()})):
        wire.answers["weights_checker"] = [httpx.Response(200, json={"ranks": [{"checksums": names}]})]
        assert control.kept(model) == [{"w": [((0, 2), (0, 4))]}, {"w": [((2, 4), (0, 4))], "s": [()]}]
        checked = {"action": "slimrl_kept", "skip_tensor_list": None, "selector": model.value}
        assert wire.calls.pop() == ("POST", "weights_checker", checked)


def test_memory_is_released_when_nothing_runs_any_more(wire: Wire, control: SglangControl):
    control.release_memory([EngineMemory.kv_cache])
    assert wire.calls == [
        ("POST", "pause_generation", {"mode": "abort"}),
        ("POST", "flush_cache?timeout=9", {}),
        ("POST", "release_memory_occupation", {"tags": ["kv_cache"]}),
    ]


def test_an_update_of_draft_models_opens_and_closes_them_too(wire: Wire):
    wire.answers["begin_weight_update"] = [httpx.Response(400, json={"message": "an update is already open"})]
    wire.answers["weights_checker"] = [httpx.Response(200, json={"ranks": [{"checksums": {"draft.w": "ab"}}]})]
    control = SglangControl("engine 2", "http://10.0.0.1:1", timeout_s=10.0, updates_draft=True, key=EngineKey("k"))
    control.begin_update()
    assert control.draft_fingerprints(["w"]) == {"w": "ab"}
    control.close()
    begin = ("POST", "begin_weight_update", {"selector": "all"})
    checked = {"action": "slimrl_fingerprints", "skip_tensor_list": ["w"], "selector": "draft"}
    assert wire.calls == [begin, ("POST", "end_weight_update", {}), begin, ("POST", "weights_checker", checked)]


def test_an_update_that_broke_off_is_closed_before_the_next_begins(wire: Wire, control: SglangControl):
    wire.answers["begin_weight_update"] = [httpx.Response(400, json={"message": "an update is already open"})]
    control.begin_update()
    assert [route for _, route, _ in wire.calls] == ["begin_weight_update", "end_weight_update", "begin_weight_update"]
    wire.answers["begin_weight_update"] = [httpx.Response(400, json={"message": "no"})]
    with pytest.raises(EngineError, match="engine 2, begin_weight_update: 400 no"):
        control.begin_update()


def test_what_an_engine_says_of_itself_is_read(wire: Wire, control: SglangControl):
    states = [{"slimrl_running_requests": 2}, {"slimrl_running_requests": 3}]
    wire.answers = {
        "server_info": [httpx.Response(200, json={"internal_states": states}) for _ in range(2)],
        "model_info": [httpx.Response(200, json={"weight_version": "12"})],
        "weights_checker": [httpx.Response(200, json={"ranks": [{"checksums": {"w": "ab"}}, {"checksums": {}}]})],
    }
    assert control.running_requests() == 5
    control.probe(0.5)
    assert control.version() == 12
    assert control.fingerprints(["w"]) == {"w": "ab"}
    assert wire.timeouts == [10.0, 0.5, 10.0, 10.0]
    checked = {"action": "slimrl_fingerprints", "skip_tensor_list": ["w"], "selector": "target"}
    assert wire.calls[2:] == [("GET", "model_info", None), ("POST", "weights_checker", checked)]
    assert (control.name, control.place.num_ranks, control.place.nodes) == ("engine 2", 2, ("host-a",))
    assert SglangControl("engine 0", "http://10.0.0.1:1", timeout_s=1.0, key=EngineKey("k")).place.num_ranks == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(200, json={"success": False, "message": "rank 1: no such tensor"}), "200 rank 1: no such"),
        (httpx.Response(400, json={"success": True, "message": "busy"}), "400 busy"),
        (httpx.Response(500, text="x" * 900), "500 " + "x" * 500 + "$"),
        (httpx.Response(500, json=["a"]), r'500 \["a"\]'),
    ],
)
def test_a_refusal_is_an_error_with_its_reason(wire: Wire, control: SglangControl, answer: httpx.Response, said: str):
    wire.answers["end_weight_update"] = [answer]
    with pytest.raises(EngineError, match=f"^engine 2, end_weight_update: {said}"):
        control.end_update()


def test_a_list_or_prose_is_agreement_and_silence_is_an_error_with_the_seconds(
    wire: Wire, control: SglangControl, monkeypatch: pytest.MonkeyPatch
):
    wire.answers["flush_cache"] = [httpx.Response(200, json=["fine"])]
    control.flush_cache()

    for error, said in (
        (httpx.ReadTimeout(""), "no answer within 10 s"),
        (httpx.ConnectError("refused"), "ConnectError refused$"),
        (httpx.ReadError(""), "ReadError$"),
    ):

        def fail(request, error=error):
            raise error

        monkeypatch.setattr(wire, "handle", fail)
        with pytest.raises(EngineError, match=f"engine 2, flush_cache: {said}"):
            control.flush_cache()
