"""What is sent to an engine and read from it, the log's cause, the command line, and rounds in lock-step."""

import ast
import asyncio
import base64
import random
from dataclasses import replace

import numpy as np
import pytest

from slimrl.config.env_vars import ENGINE_PINNED
from slimrl.config.package_fields import package_folder
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import EngineError, GenerateRequest, GenerateResult
from slimrl.engines.client import batch_body, parse_answer, request_body
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.servers.control import EngineMemory
from slimrl.engines.servers.process import find_cause
from slimrl.engines.servers.server import engine_arguments, engine_environment


def request_of(session, seed=1, **changes):
    values = {
        "session_id": session,
        "input_ids": [1, 2, 3],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 5,
        "stop_token_ids": (2, 9),
        "timeout_s": 10.0,
        "seed": seed,
    }
    return GenerateRequest(**values | changes)


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def answer_of(**changes):
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 9, None]],
        "weight_version": "4",
        "weight_versions": [span("3", 0, 1), span("4", 1, 2)],
        "finish_reason": {"type": "stop", "matched": 9},
        "cached_tokens": 2,
    }
    return {"output_ids": [7, 9], "meta_info": meta | changes}


def test_without_stop_tokens_the_turn_runs_to_its_limit():
    assert request_body(request_of("s"), "r", routed_experts=False)["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 5,
        "stop_token_ids": (2, 9),
        "sampling_seed": 1,
    }
    sampling = request_body(request_of("s", seed=None, stop_token_ids=()), "r", routed_experts=False)["sampling_params"]
    assert sampling["ignore_eos"] is True
    assert not {"sampling_seed", "stop_token_ids"} & sampling.keys()


def test_a_batch_keeps_each_requests_own_settings():
    body = batch_body([request_of("a"), request_of("b", seed=2, max_new_tokens=8)], ["x", "y"], routed_experts=True)
    assert body["rid"] == ["x", "y"]
    assert [s["sampling_seed"] for s in body["sampling_params"]] == [1, 2]
    assert [s["max_new_tokens"] for s in body["sampling_params"]] == [5, 8]
    assert body["return_routed_experts"] is True


def test_an_answer_gives_tokens_logprobs_version_and_routing():
    experts = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    encoded = base64.b64encode(experts.tobytes()).decode()
    result = parse_answer(answer_of(routed_experts=encoded), request_of("s"), (3, 2))
    assert (result.tokens, result.logprobs) == ([7, 9], [-0.5, -1.5])
    assert (result.weight_versions.tolist(), result.weight_versions.dtype) == ([3, 4], np.int32)
    assert (result.finish_reason, result.cached_tokens) == ("stop", 2)
    assert result.routed_experts is not None
    assert result.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(result.routed_experts, experts)


def test_each_request_of_a_call_gets_the_experts_from_where_it_asked():
    """Three tokens in and two out: the last was not read, and the call asked from token 1 on."""
    experts = np.arange(3 * 3 * 2, dtype=np.int32).reshape(3, 3, 2)
    answer = answer_of(routed_experts=base64.b64encode(experts.tobytes()).decode())
    for asked_from in (1, 3):
        result = parse_answer(answer, request_of("s", experts_from=asked_from), (3, 2), first_expert_row=1)
        np.testing.assert_array_equal(result.routed_experts, experts[asked_from - 1 :])
    both = [request_of("a", experts_from=3), request_of("b", experts_from=1)]
    assert batch_body(both, ["x", "y"], routed_experts=True)["routed_experts_start_len"] == 1
    with pytest.raises(ValueError, match="reshape"):
        parse_answer(answer, request_of("s"), (3, 2))


def test_a_request_that_was_aborted_in_the_queue_has_what_it_sampled_before_and_neither_cache_nor_experts():
    aborted = answer_of(finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    del aborted["meta_info"]["cached_tokens"]
    result = parse_answer(aborted, request_of("s"), (3, 2))
    assert (result.tokens, result.finish_reason) == ([7, 9], "abort")
    assert (result.cached_tokens, result.routed_experts) == (0, None)
    aborted["meta_info"] |= {"output_token_logprobs": [], "weight_versions": [span("4", 0, 0)]}
    result = parse_answer(aborted, request_of("s"), (3, 2))
    assert (result.tokens, result.weight_versions.tolist()) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"meta_info": {}},
        answer_of(finish_reason=None),
        answer_of(finish_reason={"type": "?"}),
        answer_of(output_token_logprobs=[[-0.5, 7, None], [None, 9, None]]),
        answer_of(weight_versions=[span("default", 0, 2)]),
        answer_of(weight_versions=[]),
        answer_of(weight_versions=[span("3", 0, 1)]),
        answer_of(weight_versions=[span("3", 0, 3)]),
        answer_of(weight_versions=[span("3", 1, 2)]),
        answer_of(weight_versions=[span("3", 0, 1), span("4", 0, 2)]),
    ],
)
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises((KeyError, TypeError, ValueError)):
        parse_answer(answer, request_of("s"), None)


def test_the_cause_is_the_childs_exception_and_not_the_parents_complaint():
    log = """starting
[2026] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3, in run
    load()
ValueError: no weights in /models/x

Traceback (most recent call last):
  File "engine.py", line 9, in wait
    raise
RuntimeError: Rank 0 scheduler died during initialization
[2026] killed
"""
    assert find_cause(log.splitlines()) == "ValueError: no weights in /models/x"
    assert find_cause(["error: unrecognized arguments: --foo"]) == "error: unrecognized arguments: --foo"
    assert find_cause([]) == "its log is empty"


def test_the_recipes_own_sglang_settings_win():
    rollout = RolloutConfig(
        max_trajectory_tokens=100,
        max_concurrency_per_engine=4,
        sglang={"max_total_tokens": 999, "sleep_on_idle": False, "disable_radix_cache": True, "stop_words": ["a", "b"]},
    )
    how = {"host": "h", "port": 1, "precision": Precision.fp32, "cuda": False, "seed": 0}
    assert "--trust-remote-code" in engine_arguments(rollout, "m", **how, trust_remote_code=True)
    assert "--trust-remote-code" not in engine_arguments(rollout, "m", **how)
    flags = engine_arguments(rollout, "m", host="h", port=1, precision=Precision.fp32, cuda=False, seed=0)
    assert flags[flags.index("--max-total-tokens") + 1] == "999"
    assert flags[flags.index("--dtype") + 1] == "float32"
    assert "--sleep-on-idle" not in flags
    assert "--disable-radix-cache" in flags
    assert flags[flags.index("--stop-words") + 1 :][:2] == ["a", "b"]
    assert "--device" not in engine_arguments(
        rollout, "m", host="h", port=1, precision=Precision.bf16, cuda=True, seed=0
    )


class RecordingEngine:
    """Answers batches at once and remembers them."""

    def __init__(self, fail=False):
        self.batches, self.fail = [], fail

    async def generate_batch(self, requests):
        self.batches.append([request.session_id for request in requests])
        await asyncio.sleep(0)
        if self.fail:
            raise EngineError("engine 0: gone")
        return [
            GenerateResult(
                tokens=[request.seed], logprobs=[0.0], weight_versions=np.zeros(1, np.int32), finish_reason="stop",
                routed_experts=None, cached_tokens=0,
            )
            for request in requests
        ]  # fmt: skip

    async def aclose(self):
        pass


async def play(lockstep, session, turns):
    try:
        for turn in range(turns):
            result = await lockstep.generate(request_of(session, seed=turn))
            assert result.tokens == [turn]
            await asyncio.sleep(random.random() * 0.005)
    finally:
        lockstep.close(session)


async def test_rounds_do_not_depend_on_who_arrives_first():
    histories = []
    for _ in range(3):
        engines = [RecordingEngine(), RecordingEngine()]
        lockstep = LockstepEngine(engines)
        turns = {f"s{index}": 1 + index % 3 for index in range(7)}
        lockstep.open(list(turns), at_once=9)
        order = random.sample(sorted(turns), len(turns))
        await asyncio.gather(*(play(lockstep, session, turns[session]) for session in order))
        histories.append([engine.batches for engine in engines])
    assert histories[0] == histories[1] == histories[2]
    assert histories[0][0] == [["s0", "s2", "s4", "s6"], ["s2", "s4"], ["s2"]]
    assert histories[0][1] == [["s1", "s3", "s5"], ["s1", "s5"], ["s5"]]


async def test_a_session_takes_the_place_of_one_that_has_left_whoever_is_fast():
    histories = []
    for _ in range(3):
        engines = [RecordingEngine()]
        lockstep = LockstepEngine(engines)
        turns = {"s0": 3, "s1": 1, "s2": 2, "s3": 2, "s4": 1}
        lockstep.open(list(turns), at_once=2)
        slots = asyncio.Semaphore(2)

        async def episode(session, slots=slots, lockstep=lockstep, turns=turns):
            async with slots:
                await play(lockstep, session, turns[session])
                # What scoring takes.
                await asyncio.sleep(random.random() * 0.005)

        async with asyncio.timeout(20):
            await asyncio.gather(*map(episode, turns))
        histories.append(engines[0].batches)
    assert histories[0] == [["s0", "s1"], ["s0", "s2"], ["s0", "s2"], ["s3", "s4"], ["s3"]]
    assert histories[0] == histories[1] == histories[2]


async def test_a_failing_call_fails_its_requests_and_no_others():
    lockstep = LockstepEngine([RecordingEngine(fail=True), RecordingEngine()])
    lockstep.open(["a", "b"], at_once=9)
    bad, good = await asyncio.gather(play(lockstep, "a", 1), play(lockstep, "b", 1), return_exceptions=True)
    assert isinstance(bad, EngineError)
    assert good is None


async def test_a_session_that_is_cancelled_does_not_hold_up_the_round():
    lockstep = LockstepEngine([RecordingEngine()])
    lockstep.open(["a", "b"], at_once=9)
    cancelled = asyncio.create_task(play(lockstep, "a", 1))
    await asyncio.sleep(0)
    cancelled.cancel()
    async with asyncio.timeout(5):
        await play(lockstep, "b", 2)


async def test_a_request_out_of_turn_or_without_seed_is_refused():
    lockstep = LockstepEngine([RecordingEngine()])
    with pytest.raises(ValueError, match="was not opened"):
        await lockstep.generate(request_of("a"))
    lockstep.open(["a"], at_once=9)
    with pytest.raises(ValueError, match="without a seed"):
        await lockstep.generate(request_of("a", seed=None))
    with pytest.raises(ValueError, match="already open"):
        lockstep.open(["a"], at_once=9)


async def test_when_all_sessions_have_ended_no_round_is_under_way_and_the_next_ones_begin_anew():
    engines = [RecordingEngine(), RecordingEngine()]
    lockstep = LockstepEngine(engines)
    for _ in range(2):
        lockstep.open(["a", "b"], at_once=9)
        await asyncio.gather(play(lockstep, "a", 1), play(lockstep, "b", 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    # Both times over both engines: what has left counts no more.
    assert [engine.batches for engine in engines] == [[["a"], ["a"]], [["b"], ["b"]]]


async def test_connections_are_closed_and_a_round_under_way_ends_before():
    journal = []

    class Stuck(RecordingEngine):
        async def generate_batch(self, requests):
            try:
                await asyncio.sleep(60)
            finally:
                journal.append("round ended")

        async def aclose(self):
            journal.append("closed")

    lockstep = LockstepEngine([Stuck(), Stuck()])
    lockstep.open(["a"], at_once=1)
    waiting = asyncio.create_task(lockstep.generate(request_of("a")))
    for _ in range(3):
        await asyncio.sleep(0)
    await lockstep.aclose()
    assert journal == ["round ended", "closed", "closed"]
    with pytest.raises(asyncio.CancelledError):
        await waiting


def flags_of(rollout, **given) -> dict[str, str]:
    """SGLang's command line by flag; a bare flag has no value."""
    options = {"host": "h", "port": 7, "precision": Precision.bf16, "cuda": False, "seed": 5, **given}
    words = engine_arguments(rollout, "m", **options)
    following = [*words[1:], "--"]
    return {a: "" if b.startswith("--") else b for a, b in zip(words, following, strict=True) if a.startswith("--")}


def test_the_command_line_of_an_engine():
    rollout = RolloutConfig(
        engine_tp=4, engine_ep=2, max_trajectory_tokens=5000, max_concurrency_per_engine=8, routed_experts=True
    )
    common = {
        "--model-path": "m",
        "--host": "h",
        "--port": "7",
        "--dtype": "bfloat16",
        "--tp-size": "4",
        "--ep-size": "2",
        "--attn-dp-size": "1",
        "--random-seed": "5",
        "--skip-server-warmup": "",
        "--weight-version": "0",
        "--enable-return-routed-experts": "",
        "--disable-shared-experts-fusion": "",
        "--sleep-on-idle": "",
        "--log-level": "warning",
    }
    cpu = {"--device": "cpu", "--attention-backend": "torch_native", "--mem-fraction-static": "0.5"}
    assert flags_of(rollout) == {**common, **cpu, "--max-total-tokens": "40000"}
    small = RolloutConfig(max_trajectory_tokens=100, max_concurrency_per_engine=1, routed_experts=False)
    assert flags_of(small)["--max-total-tokens"] == "16384"
    # Only as many as the step has.
    assert flags_of(rollout, trajectories=6)["--max-total-tokens"] == "30000"
    assert flags_of(rollout, trajectories=100)["--max-total-tokens"] == "40000"
    assert flags_of(rollout, trajectories=1)["--max-total-tokens"] == "16384"
    grouped = flags_of(replace(rollout, engine_attention_dp=2))
    assert (grouped["--attn-dp-size"], grouped["--max-total-tokens"]) == ("2", "20000")
    assert flags_of(replace(rollout, engine_attention_dp=2), trajectories=7)["--max-total-tokens"] == "20000"
    assert "--enable-return-routed-experts" not in flags_of(small)
    for colocated in (True, False):
        rollout.colocated = colocated
        saver = {"--enable-memory-saver": "", "--disable-prefill-cuda-graph": ""} if colocated else {}
        assert flags_of(rollout, cuda=True) == {**common, **saver}
    plain = flags_of(rollout, cuda=True, dequantize=True)
    assert plain == {**common, "--json-model-override-args": '{"quantization_config": null}'}
    assert flags_of(rollout, cuda=True, linear_attention=True) == {**common, **saver}
    states = {
        "--mamba-radix-cache-strategy": "no_buffer",
        "--disable-overlap-schedule": "",
        "--max-mamba-cache-size": "32",
        "--max-total-tokens": "40000",
    }
    assert flags_of(rollout, linear_attention=True) == {**common, **cpu, **states}
    # Each group of ranks has those of a whole number of requests, and so of one at least.
    few = replace(rollout, engine_attention_dp=4, max_concurrency_per_engine=1)
    assert flags_of(few, linear_attention=True)["--max-mamba-cache-size"] == "16"
    nothing = RolloutConfig(max_trajectory_tokens=100, sglang={"random_seed": None, "page_size": (1, 2)})
    assert "--random-seed" not in flags_of(nothing)
    words = engine_arguments(nothing, "m", host="h", port=7, precision=Precision.fp32, cuda=True, seed=5)
    assert words[words.index("--page-size") :][:3] == ["--page-size", "1", "2"]


def test_the_ranks_of_an_engine_on_a_cpu_have_cores_of_their_own():
    rollout = RolloutConfig(engine_tp=3, threads_per_engine=2)
    found = engine_environment(rollout, precision=Precision.fp32, cuda=False)
    assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "0-1|2-3|4-5"
    assert (found["OMP_NUM_THREADS"], found["SGLANG_USE_CPU_ENGINE"]) == ("2", "1")
    # What a step frees is kept for the next one.
    assert found["MALLOC_TRIM_THRESHOLD_"] == str(2**30)
    rollout.threads_per_engine = 1
    assert engine_environment(rollout, precision=Precision.fp32, cuda=False)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2"
    rollout.engine_tp = 1
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in engine_environment(rollout, precision=Precision.fp32, cuda=False)
    assert engine_environment(rollout, precision=Precision.fp32, cuda=True) == {
        "OMP_NUM_THREADS": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        **{name: value for name, (value, _) in ENGINE_PINNED.items()},
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "false",
    }
    assert engine_environment(rollout, precision=Precision.bf16, cuda=True)["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16"
    rollout.colocated = True
    assert engine_environment(rollout, precision=Precision.fp32, cuda=True)["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "true"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in engine_environment(rollout, precision=Precision.fp32, cuda=False)


def test_the_parts_of_an_engine_s_memory_are_all_that_sglang_can_release():
    names = {"GPU_MEMORY_TYPE_KV_CACHE", "GPU_MEMORY_TYPE_WEIGHTS", "GPU_MEMORY_TYPE_CUDA_GRAPH"}
    assigned = ast.parse((package_folder("sglang") / "srt" / "constants.py").read_text()).body
    values = {ast.unparse(n.targets[0]): n.value for n in assigned if isinstance(n, ast.Assign)}
    assert {ast.unparse(name) for name in values["GPU_MEMORY_ALL_TYPES"].elts} == names
    assert {ast.literal_eval(values[name]) for name in names} == {part.value for part in EngineMemory}
