"""Estimated times of a plan: rollouts, an optimizer on the host, and the order of suggestions, against closed forms."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.estimates.planner.engine import EnginePlan
from slimrl.estimates.planner.generation import decoding_step_bytes, rollout_at_least_s, running_sequences
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.model_state import host_update_s
from slimrl.estimates.planner.parameters import ChunkParameters
from slimrl.estimates.planner.restart import plan_restart
from slimrl.estimates.planner.shape import Shape
from slimrl.estimates.planner.suggest import ranked
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config

ENGINE = EnginePlan(
    weights=8_000_000_000,
    expert_weights=0,
    kv_cache=40_000_000_000,
    mem_fraction_static=0.7,
    kv_bytes_per_token=25_000,
    kv_tokens=1_600_000,
    trajectories=160,
)


def shape_of(name: str) -> Shape:
    config = published_config(name)
    return Shape.of(family_of(config).megatron_config(config))


def recipe(**rollout) -> Recipe:
    plain = Recipe()
    settings = {"num_engines": 2, "engine_tp": 4, "prompts_per_step": 32, "samples_per_prompt": 8, "max_turns": 1}
    sampling = replace(plain.rollout.sampling, max_new_tokens=6000)
    return replace(plain, rollout=replace(plain.rollout, sampling=sampling, **{**settings, **rollout}))


def test_a_decoding_step_reads_dense_weights_the_experts_that_a_batch_meets_and_its_cache():
    engine = replace(ENGINE, expert_weights=7_000_000_000)
    for batch, met in ((1, 8 / 128), (2, 1 - (120 / 128) ** 2), (10_000, 1.0)):
        read = decoding_step_bytes(shape_of("Qwen3-30B-A3B"), engine, sequences=batch, in_group=1, context=3000)
        assert read == pytest.approx(1e9 + 7e9 * met + 3000 * 25_000, rel=1e-6)


def test_a_decoding_step_reads_and_writes_the_states_of_its_sequences():
    shape = shape_of("Qwen3-Next-80B-A3B")
    plain, states = (
        decoding_step_bytes(shape, replace(ENGINE, state_bytes=size), sequences=6, in_group=3, context=100)
        for size in (0, 1_000_000)
    )
    assert states - plain == 3 * 2 * 1_000_000


def test_an_engine_runs_no_more_sequences_than_have_states():
    assert running_sequences(recipe(max_concurrency_per_engine=256), replace(ENGINE, sequences=20), 10_000) == 20
    assert running_sequences(recipe(max_concurrency_per_engine=10), replace(ENGINE, sequences=20), 10_000) == 10


def test_a_dense_model_is_read_whole_by_every_decoding_step():
    read = decoding_step_bytes(shape_of("Qwen3-8B"), ENGINE, sequences=4, in_group=1, context=100)
    assert read == pytest.approx(8e9 + 100 * 25_000)


@pytest.mark.parametrize(
    ("most", "length", "running"), [(256, 10_000, 128), (256, 20_000, 80), (50, 10_000, 50), (256, 5_000_000, 1)]
)
def test_an_engine_runs_what_it_is_given_what_may_run_and_what_its_cache_holds(most, length, running):
    assert running_sequences(recipe(max_concurrency_per_engine=most), ENGINE, length) == running


def test_what_may_run_is_a_number_for_each_engine_so_that_many_engines_have_work():
    many = recipe(num_engines=16, prompts_per_step=64, max_concurrency_per_engine=20)
    assert running_sequences(many, ENGINE, 10_000) == 20
    many.rollout.max_concurrency_per_engine = 256
    assert running_sequences(many, ENGINE, 10_000) == 64 * 8 / 16


def test_a_rollout_takes_a_decoding_step_for_each_token_of_each_wave():
    # 128 trajectories an engine in two waves of 64, of 2000 tokens of prompt and 6000 sampled ones.
    for groups in (1, 4):
        given = recipe(max_concurrency_per_engine=64, engine_attention_dp=groups)
        seconds = rollout_at_least_s(given, shape_of("Qwen3-8B"), ENGINE, Hardware(), flops=1e12, length=8000)
        assert seconds == pytest.approx(2 * 6000 * (8e9 + 64 // groups * 5000 * 25_000) / 3350e9)


def test_a_rollout_of_little_memory_traffic_is_as_long_as_its_operations():
    seconds = rollout_at_least_s(recipe(), shape_of("Qwen3-8B"), ENGINE, Hardware(), flops=1e21, length=8000)
    assert seconds == pytest.approx(1e21 / (8 * 989e12))


def test_an_optimizer_on_the_host_takes_its_time_by_parameter_and_thread():
    megatron = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    trainer = replace(Recipe().trainer, num_ranks=1, precision=Precision.bf16, threads_per_rank=4, megatron=megatron)
    stage = (ChunkParameters(dense=(64 * 10**6,), experts=()),)
    assert host_update_s(stage, trainer, Hardware()) == pytest.approx(64e6 / (4 * 0.4e9), rel=1e-3)
    assert host_update_s(stage, replace(trainer, megatron={}), Hardware()) == 0


def layout(seconds: float, tensor: int, *, fits: bool = True, most_bytes: int = 1):
    parallel = SimpleNamespace(tensor=tensor, context=1, pipeline=1, expert=1)
    recipe = SimpleNamespace(trainer=SimpleNamespace(parallel=parallel))
    return SimpleNamespace(step_s=seconds, fits=fits, most_bytes=most_bytes, recipe=recipe)


def test_of_layouts_within_five_percent_of_the_fastest_the_simplest_is_first():
    plans = [layout(1, 1, fits=False, most_bytes=9), layout(106, 1), layout(104.9, 2), layout(100, 4)]
    plans += [layout(105.1, 1), layout(1, 1, fits=False, most_bytes=8), layout(103, 2)]
    order = [(plan.step_s, plan.most_bytes) for plan in ranked(plans)]
    assert order == [(103, 1), (104.9, 1), (100, 1), (105.1, 1), (106, 1), (1, 8), (1, 9)]


def test_a_restart_reads_weights_and_states_at_the_speed_of_the_nodes_or_of_the_file_system():
    given = recipe(num_engines=3, engine_tp=8)
    given.trainer.num_ranks, given.checkpoint.every_steps = 16, 20
    given.trainer.precision = Precision.bf16
    figures = {"step_s": 100.0, "sent_bytes": 40 * 10**9, "resync_s": 2.0}
    found = plan_restart(given, 10**10, None, Hardware(), **figures)
    # Two bytes of each weight and twelve of its states by two nodes of 8 GB/s; three nodes of engines read 40 GB each.
    assert found.checkpoint_bytes == 14 * 10**10
    assert found.checkpoint_s == pytest.approx(140 / 16)
    assert found.engines_s == pytest.approx(40 / 8)
    assert found.in_place_s == pytest.approx(2 * 140 / 16 + 2)
    assert found.new_job_s == pytest.approx(2 * 140 / 16 + 2 + 5)
    assert found.lost_s == pytest.approx(10 * 100)
    assert found.from_copy_s is found.lost_from_copy_s is None
    given.trainer.num_ranks = 512
    assert plan_restart(given, 10**10, None, Hardware(), **figures).checkpoint_s == pytest.approx(140 / 40)
    # Adapters alone have states, and weights beside those of the model.
    assert plan_restart(given, 10**10, 10**8, Hardware(), **figures).checkpoint_bytes == 2 * 101 * 10**8 + 12 * 10**8
    given.checkpoint.every_steps = 0
    assert plan_restart(given, 10**10, None, Hardware(), **figures).lost_s is None


def test_a_restart_from_a_copy_in_memory_reads_nothing_and_is_made_in_place_alone():
    given = recipe(num_engines=3, engine_tp=8)
    given.checkpoint.in_memory_every_steps = 4
    figures = {"step_s": 100.0, "sent_bytes": 40 * 10**9, "resync_s": 2.0}
    found = plan_restart(given, 10**10, None, Hardware(), **figures)
    # Until a copy is whole, half of its interval is lost on average, and the interval before it.
    assert (found.from_copy_s, found.lost_from_copy_s) == (2.0, pytest.approx(2 * 100 + 4 * 100))
    given.run.max_restarts = 0
    alone = plan_restart(given, 10**10, None, Hardware(), **figures)
    assert alone.in_place_s is alone.from_copy_s is alone.lost_from_copy_s is None
    assert alone.new_job_s == found.new_job_s
