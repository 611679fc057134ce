"""A planned layout as a whole: its batch, its time and what keeps it from fitting, against sums by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.data import SftConfig
from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.rollout import RolloutMode
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.estimates.planner.communication import Communication, logprob_communication, update_communication
from slimrl.estimates.planner.engine import GIB, EnginePlan
from slimrl.estimates.planner.generation import rollout_at_least_s
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.layout_plan import LayoutPlan, plan_layout
from slimrl.estimates.planner.memory import StageMemory
from slimrl.estimates.planner.model_state import host_update_s
from slimrl.estimates.planner.parameters import ChunkParameters, ModelParameters
from slimrl.estimates.planner.plan import Plan, _model_notes, _notes, _transport, as_json
from slimrl.estimates.planner.restart import Restart
from slimrl.estimates.planner.schedule import Batch, update_batch
from slimrl.estimates.planner.shape import Shape
from slimrl.estimates.planner.tables import print_plan
from slimrl.estimates.planner.work import Work, step_work
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config

SHAPE = Shape(
    hidden=64, heads=4, query_columns=16, value_columns=16, kv_heads=2, query_latent=0, kv_latent=0, rotary_columns=0,
    qk_norm=False, dense_columns=128, expert_columns=0, shared_columns=0, experts=0, topk=0, sparse=(False,) * 4,
    linear=(False,) * 4,
    vocab=1000,
)  # fmt: skip
PARAMETERS = ModelParameters(total=10**9, active=10**9, active_without_embedding=9 * 10**8)
ENGINE = EnginePlan(
    weights=2 * GIB, expert_weights=GIB, kv_cache=30 * GIB, mem_fraction_static=0.5, kv_bytes_per_token=1000,
    kv_tokens=10**6, trajectories=100,
)  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def recipe(num_ranks: int, *, updates: int = 1, tokens: int = 1000, megatron: dict | None = None, **parallel) -> Recipe:
    plain = Recipe(sft=SftConfig(batch_conversations=10, max_tokens=700))
    trainer = replace(
        plain.trainer, num_ranks=num_ranks, parallel=ParallelConfig(**parallel), precision=Precision.bf16,
        max_tokens_per_rank=tokens, updates_per_rollout=updates, megatron=megatron or {},
    )  # fmt: skip
    rollout = replace(plain.rollout, prompts_per_step=33, samples_per_prompt=8, max_trajectory_tokens=1500)
    return replace(plain, trainer=trainer, rollout=rollout)


@pytest.mark.parametrize(
    ("given", "sft", "mean_tokens", "sequences", "length", "micro_batches"),
    [
        # 264 trajectories on 2 ranks, one of the longest at a time.
        (recipe(2), False, None, 264, 1500, 132),
        # Half of them for each of two updates, three of 300 tokens at a time.
        (recipe(2, updates=2), False, 300, 132, 300, 22),
        # Two context-parallel ranks hold twice the tokens together; two pairs of ranks for each of two stages.
        (recipe(16, tensor=2, context=2, pipeline=2), False, 900, 264, 900, 66),
        # 33 micro-batches, for which an interleaved pipeline of 4 takes 36.
        (recipe(16, tensor=2, pipeline=4, virtual_pipeline=2), False, 250, 264, 250, 36),
        (recipe(16, tensor=2, pipeline=4, virtual_pipeline=1), False, 250, 264, 250, 33),
        (recipe(2, updates=2), True, None, 10, 700, 5),
        (recipe(2, updates=2), True, 400, 10, 400, 3),
        # More ranks than conversations.
        (recipe(16), True, None, 10, 700, 1),
    ],
)
def test_an_update_has_as_many_micro_batches_as_full_ones_take(
    given, sft, mean_tokens, sequences, length, micro_batches
):
    found = update_batch(given, sft=sft, mean_tokens=mean_tokens)
    expected = Batch(tokens=sequences * length, trajectory_tokens=length, micro_batches=micro_batches)
    assert found == expected


def test_a_step_takes_its_operations_at_the_speed_that_the_gpus_reach():
    hardware = Hardware(peak_tflops=500, mfu=0.5)
    batch = Batch(tokens=200_000, trajectory_tokens=1000, micro_batches=9)
    # Twice the parameters that multiply, and 4 heads of 16 and 16 columns over 4 layers and 1000 tokens.
    each = 2 * 9e8 + 4 * 1000 * 4 * (16 + 16)
    for megatron, passes in (({}, 3), (FULL, 4), ({"recompute_granularity": "selective"}, 3)):
        given = recipe(16, updates=2, pipeline=4, megatron=megatron)
        found = step_work(given, SHAPE, PARAMETERS, batch, hardware, engine=ENGINE)
        speed = 16 * 500e12 * 0.5 * 9 / 12
        assert found.bubble == pytest.approx(3 / 12)
        assert found.generation_flops == pytest.approx(2 * 200_000 * each)
        # Of the second update alone.
        assert found.logprob_flops == pytest.approx(200_000 * each)
        assert found.training_flops == pytest.approx(passes * 2 * 200_000 * each)
        assert found.logprob_s == pytest.approx(200_000 * each / speed)
        assert found.training_s == pytest.approx(passes * 2 * 200_000 * each / speed)
        assert found.rollout_at_least_s == rollout_at_least_s(
            given, SHAPE, ENGINE, hardware, flops=found.generation_flops, length=1000
        )
    alone = step_work(given, SHAPE, PARAMETERS, batch, hardware, engine=None)
    # `updates_per_rollout` is of rollouts.
    assert alone.training_flops == pytest.approx(3 * 200_000 * each)
    assert (alone.logprob_flops, alone.logprob_s, alone.generation_flops, alone.rollout_at_least_s) == (0, 0, 0, 0)


def test_ranks_that_get_a_sequence_less_than_others_wait_for_them():
    batch = Batch(tokens=10 * 700, trajectory_tokens=700, micro_batches=3)
    even = step_work(recipe(10), SHAPE, PARAMETERS, batch, Hardware(), engine=None)
    for given, share in (
        (recipe(8), 10 / 16),
        (recipe(32, tensor=2, context=2), 10 / 16),
        (recipe(20), 10 / 20),
        (recipe(5), 1.0),
    ):
        found = step_work(given, SHAPE, PARAMETERS, batch, Hardware(), engine=None)
        assert found.training_s == pytest.approx(even.training_s * 10 / given.trainer.num_ranks / share)


STAGES = [(ChunkParameters(dense=(10**8,), experts=()),), (ChunkParameters(dense=(2 * 10**8,), experts=()),)]
LAYERS = [[0, 1], [2, 3]]


def planned(given: Recipe, hardware: Hardware, *, sft: bool = False, mean_tokens: int | None = None) -> LayoutPlan:
    model = SimpleNamespace(mtp_layers=0)
    engine = None if sft else ENGINE
    facts = SimpleNamespace(
        transform=None, shape=SHAPE, parameters=PARAMETERS, slot_bytes=GIB, engine=engine, adapters=None, model=model
    )
    return plan_layout(facts, given, STAGES, LAYERS, hardware, sft=sft, mean_tokens=mean_tokens)


OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}


def test_a_step_is_made_of_work_communication_and_the_host_s_updates_each_as_often_as_it_happens():
    given, hardware = recipe(8, updates=3, tensor=2, sequence=True, pipeline=2, megatron=OFFLOADED), Hardware()
    given.resync.transport = TransportName.p2p
    found = planned(given, hardware, mean_tokens=400)
    batch = update_batch(given, sft=False, mean_tokens=400)
    assert (found.batch, found.updates) == (batch, 3)
    update = update_communication(SHAPE, given.trainer, STAGES, LAYERS, batch, hardware)
    logprobs = logprob_communication(SHAPE, given.trainer, LAYERS, batch, hardware)
    # The second stage has more parameters.
    on_host = host_update_s(STAGES[1], given.trainer, hardware)
    assert on_host > 0
    # The first update needs no pass.
    assert found.communication_s == pytest.approx(3 * update.total_s + 2 * logprobs.total_s)
    own = found.work.training_s + found.work.logprob_s
    assert found.training_s == pytest.approx(own + found.communication_s + 3 * on_host)
    assert found.step_s == pytest.approx(found.training_s + found.work.rollout_at_least_s)
    assert found.work == step_work(given, SHAPE, PARAMETERS, batch, hardware, engine=ENGINE)
    alone = planned(given, hardware, sft=True)
    assert (alone.updates, alone.logprobs, alone.work.rollout_at_least_s, alone.engine_gpu) == (1, None, 0, None)
    assert alone.batch.trajectory_tokens == 700
    assert alone.communication_s == pytest.approx(alone.communication.total_s)


def test_a_step_of_engines_that_sample_while_the_trainer_trains_is_the_longer_of_the_two():
    slow_memory = replace(Hardware().links, memory_gb_per_s=0.1)
    for hardware, longer in (
        (Hardware(mfu=1e-4), "training_s"),
        (Hardware(links=slow_memory), "rollout_at_least_s"),
    ):
        given, found = recipe(8), {}
        for mode in RolloutMode:
            given.rollout.mode = mode
            plan = planned(given, hardware, mean_tokens=400)
            found[mode] = plan.step_s
        parts = {"training_s": plan.training_s, "rollout_at_least_s": plan.work.rollout_at_least_s}
        assert max(parts, key=parts.get) == longer
        assert found[RolloutMode.sync] == pytest.approx(sum(parts.values()))
        assert found[RolloutMode.one_step_off] == found[RolloutMode.async_] == parts[longer]


def test_the_rollout_of_a_step_has_the_prompts_that_it_begins_with():
    given = recipe(8)
    given.rollout.prompts_per_step, given.rollout.max_concurrency_per_engine = 10, 8
    plain = planned(given, Hardware(), mean_tokens=400).work
    sampling = given.algorithm.dynamic_sampling
    sampling.oversampling = 1.45
    assert planned(given, Hardware(), mean_tokens=400).work == plain
    sampling.refill = RefillMode.order
    more = planned(given, Hardware(), mean_tokens=400).work
    # 15 of 14.5
    assert more.generation_flops == pytest.approx(1.5 * plain.generation_flops)
    assert more.rollout_at_least_s == pytest.approx(1.5 * plain.rollout_at_least_s)
    assert more.training_s == plain.training_s
    given.rollout.mode = RolloutMode.async_
    assert planned(given, Hardware(), mean_tokens=400).work == plain
    given.rollout.mode, given.rollout.max_concurrency_per_engine = RolloutMode.sync, 1000
    sampling.refill = RefillMode.off
    plain = planned(given, Hardware(), mean_tokens=400).work
    given.rollout.oversample = 1.5
    at_once = planned(given, Hardware(), mean_tokens=400).work
    assert at_once.generation_flops == plain.generation_flops
    assert at_once.rollout_at_least_s < plain.rollout_at_least_s


def test_the_time_that_is_sent_is_the_sum_over_all_kinds_of_parallelism():
    sent = Communication(tensor_s=1, context_s=2, expert_s=4, pipeline_s=8, data_s=16)
    assert sent.total_s == 31


def test_a_layout_fits_where_every_gpu_and_every_host_holds_its_share():
    given = recipe(4, pipeline=2)
    given.resync.transport = TransportName.p2p
    plenty = planned(given, Hardware())
    assert (plenty.fits, plenty.problems) == (True, [])
    totals = [stage.total for stage in plenty.memory]
    # The last stage has twice the parameters, and the logits.
    assert totals[1] > totals[0]
    assert plenty.worst == 1
    assert plenty.engine_gpu == 2 * GIB + 30 * GIB + GIB + 4 * GIB
    assert plenty.most_bytes == plenty.engine_gpu > totals[1]

    little = planned(given, Hardware(gpu_memory_gib=(totals[0] + totals[1]) / 2 / GIB))
    names = [problem.partition(":")[0] for problem in little.problems]
    assert names == ["train, stage 1", "an engine's GPU"]
    parts = little.memory[1].parts
    largest = max(parts, key=parts.__getitem__)
    assert little.problems[0].endswith(f", the largest part is {largest} with {parts[largest] / GIB:.1f}")
    assert little.problems[1].startswith("an engine's GPU: 37.0 GiB of ")
    exact = planned(given, Hardware(gpu_memory_gib=37))
    assert exact.fits

    offloaded = recipe(4, pipeline=2, megatron=OFFLOADED)
    offloaded.resync.transport = TransportName.p2p
    host = planned(offloaded, Hardware())
    # Main weights, two moments and gradients in float32 of 2 * 10**8 parameters over two ranks, four on a node.
    nbytes = 4 * 16 * 10**8
    assert host.problems == []
    assert host.memory[1].host == pytest.approx(nbytes / 4, rel=1e-4)
    # A save: 12 bytes of each parameter, a shard and a piece on the first rank of both stages; a shard on the other.
    saving = 2 * (12 * 2 * 10**8 + 4 * (10**8 + 2**26) + 4 * 10**8)
    assert nbytes + saving == pytest.approx(12.4 * GIB, rel=0.01)
    (problem,) = planned(offloaded, Hardware(host_memory_gib=12)).problems
    assert problem == "host memory of a node: 12 GiB of 12"


def test_engines_that_span_nodes_or_hold_no_trajectory_do_not_fit():
    given = recipe(4, pipeline=2)
    given.resync.transport = TransportName.p2p
    given.rollout.engine_tp = 16
    (problem,) = planned(given, Hardware()).problems
    assert problem.startswith("rollout.engine_tp: 16 GPUs, but an engine runs on one node, which has 8.")
    assert planned(given, Hardware(gpus_per_node=16)).fits
    given.rollout.engine_nodes = 2
    assert planned(given, Hardware()).fits
    (problem,) = planned(given, Hardware(gpus_per_node=4)).problems
    assert problem.startswith("rollout.engine_tp: 16 GPUs, but an engine runs on 2 nodes, which each have 4.")


def whole_plan(*, sft: bool = False, host: int = 0, engine_gpu: int | None = None) -> Plan:
    """A plan whose figures are all different."""
    memory = [
        StageMemory(
            parts={"weights": 2 * GIB, "optimizer": 3 * GIB, "logits": 0},
            host=3 * host,
            saving=GIB,
            copying=GIB,
            held={"train": ("weights", "optimizer", "logits")},
        ),
        StageMemory(
            parts={"weights": 2 * GIB, "optimizer": 4 * GIB, "logits": GIB},
            host=host,
            saving=4 * GIB,
            copying=GIB,
            held={"train": ("weights", "optimizer", "logits"), "save": ("weights", "optimizer")},
        ),
    ]
    work = Work(
        training_flops=3e18, logprob_flops=1e18, generation_flops=2e18, training_s=30.0, logprob_s=10.0,
        rollout_at_least_s=0.0 if sft else 100.0, bubble=0.25,
    )  # fmt: skip
    sent = Communication(tensor_s=0.5, context_s=0.0, expert_s=0.0, pipeline_s=0.25, data_s=0.25)
    given = recipe(4, updates=3, pipeline=2)
    given.resync.transport, given.checkpoint.every_steps = TransportName.p2p, 10
    given.checkpoint.in_memory_every_steps, given.trainer.spare_nodes = 1, 1
    layout = LayoutPlan(
        recipe=given, stages=STAGES, layers=LAYERS, memory=memory, engine_gpu=engine_gpu, work=work,
        batch=Batch(tokens=4000, trajectory_tokens=400, micro_batches=6), communication=sent,
        logprobs=None if sft else replace(sent, data_s=0.0), host_update_s=2.0, updates=1 if sft else 3,
        problems=["too large"] if host else [],
    )  # fmt: skip
    engine = None if sft else ENGINE
    resync = None if sft else SimpleNamespace(sent_bytes=5, seconds=7.0, link_bytes={"nvlink": 4 * 10**9})
    return Plan(
        planned=SimpleNamespace(recipe=given, model="a model", sft=sft),
        hardware=Hardware(), facts=SimpleNamespace(parameters=PARAMETERS, engine=engine),
        cluster=SimpleNamespace(gpus=12, num_nodes=2), layout=layout, resync=resync, notes=["a note"],
        restart=Restart(
            checkpoint_bytes=14 * 10**9, checkpoint_s=20.0, engines_s=0.0 if sft else 30.0,
            resync_s=0.0 if sft else 7.0, lost_s=None if sft else 500.0, lost_from_copy_s=None if sft else 150.0,
            in_place=not sft,
        ),
        teacher=None,
    )  # fmt: skip


def test_a_plan_as_json_has_the_worst_stage_in_gib_and_a_step_that_adds_up():
    found = as_json(whole_plan(host=10 * GIB, engine_gpu=9 * GIB))
    memory = found["memory_gib"]
    assert (found["world_size"], found["gpus"], found["nodes"], found["fits"]) == (4, 12, 2, False)
    assert found["parameters"] == {
        "total": 10**9, "active": 10**9, "per_rank_min": 10**8, "per_rank_max": 2 * 10**8,
        "per_stage": [10**8, 2 * 10**8],
    }  # fmt: skip
    assert memory == {
        "weights": 2.0, "optimizer": 4.0, "logits": 1.0, "engine_weights": 2.0, "kv_cache": 30.0, "total": 9.0,
        "limit": 80.0,
        # Four ranks on a node, were all of the stage that keeps most on the host, the save of two stages, and of each
        # two copies and one that is staged.
        "host": 10.0, "save_of_node": 8.0, "copies_of_node": 6.0, "host_of_node": 4 * 30.0 + 8.0 + 6.0,
        "stage": 1, "phases": {"train": 7.0, "save": 6.0}, "engine_gpu": 9.0,
    }  # fmt: skip
    assert found["step"] == {
        "rollout_at_least": 100.0, "logprobs": 10.0, "training": 30.0, "communication": 3 * 1.0 + 2 * 0.75,
        "host_optimizer": 6.0, "resync": 7.0,
    }  # fmt: skip
    assert found["step_seconds"] == pytest.approx(sum(found["step"].values()))
    restart = found["restart"]
    assert (restart["in_place_s"], restart["from_copy_s"], restart["new_job_s"]) == (47.0, 7.0, 77.0)
    assert (restart["lost_s"], restart["lost_from_copy_s"]) == (500.0, 150.0)
    assert found["resync"] == {"bytes": 5, "seconds": 7.0, "links": {"nvlink": 4 * 10**9}}
    assert (found["kv_cache_tokens"], found["concurrent_trajectories"]) == (10**6, 100)
    assert found["logprob_communication"]["data_s"] == 0.0
    assert found["update_communication"]["data_s"] == 0.25

    alone = as_json(whole_plan(sft=True))
    assert alone["step"] == {
        "rollout_at_least": 0.0, "logprobs": 10.0, "training": 30.0, "communication": 1.0, "host_optimizer": 2.0,
        "resync": 0.0,
    }  # fmt: skip
    assert alone["step_seconds"] == pytest.approx(43.0)
    assert [alone["restart"][name] for name in ("in_place_s", "from_copy_s", "new_job_s")] == [None, None, 40.0]
    assert [alone[name] for name in ("resync", "logprob_communication", "kv_cache_tokens")] == [None] * 3
    assert (alone["fits"], alone["memory_gib"]["engine_gpu"], alone["memory_gib"]["total"]) == (True, None, 7.0)


def rows_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_plan_for_people_has_the_same_figures(capsys):
    print_plan(whole_plan(host=10 * GIB, engine_gpu=9 * GIB))
    rows = rows_of(capsys.readouterr().out)
    for row in (
        "model: a model",
        "world: 4 trainer ranks, 12 GPUs, 2 nodes and 1 spare node",
        "groups: tensor 1, context 1, data 2, pipeline 2 x 1; expert 1, expert tensor 1, expert data 2; optimizer "
        "states over 2 and 2 ranks",
        "engines: 1 of 1 GPUs, expert parallel 1, on GPUs of their own",
        "1 2 200,000,000 7.0 6.0",
        "memory of a GPU of stage 1",
        "= train 7.00 peak",
        "limit 80.00 --gpu-memory-gib",
        "host of a save 8.00 of a node's ranks, while a checkpoint is written",
        "= host of a node 134.00 of a node's 1,800, --host-memory-gib",
        "total on a GPU 9.00 GiB",
        "pipeline bubble 25.0%",
        "training 30.0 s at 0.4 of 989 TFLOPS, 3,000 PFLOP a step",
        "communication 4.5 s without overlap",
        "rollout at least 100.0 s, 2,000 PFLOP",
        "optimizer 6.0 s on the host",
        "= step at least 157.5 s",
        "in place (the job goes on) at least 47 s: a checkpoint of 14 GB is checked and read, 20 s each, and a resync",
        "new job (--resume, without the queue's wait) at least 77 s: the same, the engines' model in 30 s",
        "lost work 500 s on average (5 steps, half of checkpoint.every_steps 10)",
        "in place, with a copy in memory at least 7.0 s: nothing is read from the disk, and a resync",
        "lost work with a copy about 150 s on average (1.5 x checkpoint.in_memory_every_steps 1)",
        "note: a note",
        "it does not fit: too large",
    ):
        assert row in rows, row
    print_plan(whole_plan(sft=True))
    alone = rows_of(capsys.readouterr().out)
    assert "= step 43.0 s" in alone
    read = "a checkpoint of 14 GB is checked and read, 20 s each"
    assert f"new job (--resume, without the queue's wait) at least 40 s: {read}" in alone
    assert "lost work all steps: checkpoint.every_steps is 0" in alone
    assert not any(row.startswith("in place") for row in alone)
    assert "it fits" in alone
    assert not any(row.startswith(("engines", "log-probs", "rollout", "resync", "host 0")) for row in alone)


@pytest.mark.parametrize(
    ("settings", "sft", "mean_tokens", "says"),
    [
        ({}, False, None, ["longest length, 1,500 tokens"]),
        ({}, True, None, ["longest length, 700 tokens"]),
        ({}, False, 10, []),
        ({"fp8": Fp8Scaling.tensorwise}, False, 10, ["FP8 training"]),
        ({"transport": TransportName.ipc}, False, 10, ["both keep all of their memory"]),
        ({"transport": TransportName.ipc}, True, 10, []),
        ({"transport": TransportName.ipc, "colocated": True}, False, 10, []),
        ({"transport": TransportName.delta}, False, 10, ["a whole version through the disk"]),
        ({"transport": TransportName.delta}, True, 10, []),
    ],
)
def test_a_plan_notes_what_it_takes_for_granted(settings, sft, mean_tokens, says):
    given = recipe(4)
    given.trainer.fp8 = settings.get("fp8", Fp8Scaling.off)
    given.resync.transport = settings.get("transport", TransportName.p2p)
    given.rollout.colocated = settings.get("colocated", False)
    found = _notes(SimpleNamespace(recipe=given, sft=sft), mean_tokens)
    assert len(found) == len(says)
    for note, text in zip(found, says, strict=True):
        assert text in note


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "DeepSeek-V3.2",
            ["without its indexers; the indexers' keys that engines hold for each token are not counted"],
        ),
        ("gpt-oss-20b", ["as if layers with a window of 128 tokens kept all of them"]),
        ("Qwen3-VL-8B", ["the vision tower of a qwen3_vl is left out; nothing builds it"]),
        ("Kimi-K2.5", ["the vision tower of a kimi_k25 is left out, although SGLang builds it in each engine"]),
        ("Qwen3-30B-A3B", []),
    ],
)
def test_a_plan_notes_what_of_a_model_it_leaves_out(model, says):
    config = published_config(model)
    architecture = family_of(config).megatron_config(config)
    found = _model_notes(SimpleNamespace(hf_config=config, sft=False), architecture)
    assert len(found) == len(says)
    assert all(text in note for note, text in zip(found, says, strict=True))
    alone = _model_notes(SimpleNamespace(hf_config=config, sft=True), architecture)
    assert not any("engine" in note or "cache" in note for note in alone)


def test_a_resync_of_differences_is_planned_through_the_disk():
    given = recipe(4)
    for transport in TransportName:
        given.resync.transport = transport
        expected = TransportName.disk if transport is TransportName.delta else transport
        assert _transport(given) is expected
