"""Suggested layouts: which ones are tried, how they are written down, and what `slimrl plan` makes of them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.load import LoadedRecipe, intended_command
from slimrl.config.problems import Problem
from slimrl.config.schema.data import SftConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.speculative import DraftMode
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.estimates.planner import command, plan, suggest
from slimrl.estimates.planner.communication import Communication
from slimrl.estimates.planner.engine import GIB
from slimrl.estimates.planner.facts import buckets_of, model_facts, with_engines
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.layout_plan import LayoutPlan
from slimrl.estimates.planner.schedule import longest_tokens
from slimrl.estimates.planner.tables import print_suggestions
from slimrl.models.draft import draft_specs
from slimrl.models.offline_recipe import OfflineRecipe, read_offline
from slimrl.resync.pipeline import NUM_SLOTS

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TOY = toy_config("qwen3_moe", ToySize(layers=3, hidden=32, experts=4)) | {"vocab_size": 128}


def planned(
    *, sft: bool = False, megatron: dict | None = None, transport=TransportName.ipc, **parallel
) -> OfflineRecipe:
    """A recipe with two ranks, and engines of two GPUs."""
    plain = Recipe(steps=1, sft=SftConfig(batch_conversations=8, max_tokens=100))
    trainer = replace(
        plain.trainer, num_ranks=2, parallel=ParallelConfig(**parallel), precision=Precision.bf16,
        max_tokens_per_rank=100, megatron=megatron or {},
    )  # fmt: skip
    rollout = replace(plain.rollout, num_engines=1, engine_tp=2, max_trajectory_tokens=100)
    rollout.sampling.max_new_tokens = rollout.eval_sampling.max_new_tokens = 50
    plain.run.name, plain.reward.function = "toy", "toy:reward"
    recipe = replace(plain, trainer=trainer, rollout=rollout)
    recipe.resync.transport, recipe.trainer.optimizer.lr, recipe.algorithm.max_logprob_mismatch = transport, 1e-6, 0.05
    loaded = LoadedRecipe(recipe=recipe, provenance={}, path="toy.yaml", command="sft" if sft else "train")
    return OfflineRecipe(loaded=loaded, hf_config=TOY, model="a toy", notes=())


def test_sizes_that_are_tried_make_up_the_ranks_and_divide_the_experts():
    tried = list(suggest._parallels(SimpleNamespace(shape=SimpleNamespace(experts=6)), 12, 4))
    assert len({tuple(vars(parallel).values()) for parallel in tried}) == len(tried)
    for parallel in tried:
        assert 12 % (parallel.tensor * parallel.context * parallel.pipeline) == 0
        assert 12 % (parallel.expert * parallel.pipeline) == 0
        assert parallel.sequence == (parallel.tensor > 1)
    sizes = {
        name: {getattr(parallel, name) for parallel in tried} for name in ("tensor", "context", "pipeline", "expert")
    }
    assert sizes == {
        # As many as a node has, powers of two, divisors of the ranks, divisors of the experts.
        "tensor": {1, 2, 4},
        "context": {1, 2, 4},
        "pipeline": {1, 2, 3, 4, 6, 12},
        "expert": {1, 2, 3, 6},
    }
    wide = list(suggest._parallels(SimpleNamespace(shape=SimpleNamespace(experts=0)), 64, 8))
    assert {parallel.expert for parallel in wide} == {1}
    assert {parallel.tensor for parallel in wide} == {1, 2, 4, 8}
    assert {parallel.context for parallel in wide} == {1, 2, 4, 8, 16}
    assert ParallelConfig(tensor=8, context=8, sequence=True) in wide


def test_a_suggested_recipe_keeps_the_tokens_of_a_micro_batch_and_fills_the_gpus_with_engines():
    given = planned(context=2, megatron={"num_layers_in_first_pipeline_stage": 1, "moe_router_dtype": "fp64"})
    parallel = ParallelConfig(pipeline=2, context=3)
    found = suggest._with_layout(given, parallel, [[0, 1], [2]], 12, FULL)
    assert found.trainer == replace(
        given.recipe.trainer, num_ranks=12, parallel=parallel, max_tokens_per_rank=67,
        megatron={"moe_router_dtype": "fp64", "num_layers_in_last_pipeline_stage": 1, **FULL},
    )  # fmt: skip
    assert found.rollout == replace(given.recipe.rollout, num_engines=6)
    even = suggest._with_layout(given, parallel, [[0, 1], [2, 3]], 12, {})
    assert even.trainer.megatron == {"moe_router_dtype": "fp64"}
    # Engines elsewhere, and the engines of a recipe that has none, stay as they are.
    elsewhere = planned(transport=TransportName.p2p)
    for other in (elsewhere, planned(sft=True)):
        assert suggest._with_layout(other, parallel, [[0]], 12, {}).rollout == other.recipe.rollout


def test_full_recompute_is_tried_beside_what_a_recipe_has_unless_it_is_that():
    assert suggest._recomputes(planned().recipe) == [{}, FULL]
    assert suggest._recomputes(planned(megatron={"recompute_granularity": "selective"}).recipe) == [{}, FULL]
    assert suggest._recomputes(planned(megatron=FULL).recipe) == [{}]


def test_a_suggestion_is_written_as_the_overrides_that_make_it():
    given = planned(megatron={"num_layers_in_first_pipeline_stage": 1})
    parallel = ParallelConfig(tensor=2, sequence=True, expert=4)
    found = suggest._with_layout(given, parallel, [[0]], 4, FULL)
    assert suggest._settings(found, given.recipe).split() == [
        "trainer.num_ranks=4",
        "trainer.parallel.tensor=2",
        "trainer.parallel.expert=4",
        "trainer.parallel.sequence=true",
        "trainer.megatron.num_layers_in_first_pipeline_stage=null",
        "trainer.megatron.recompute_granularity=full",
        "trainer.megatron.recompute_method=uniform",
        "trainer.megatron.recompute_num_layers=1",
        "rollout.num_engines=2",
    ]
    assert suggest._settings(given.recipe, given.recipe) == "as it is"
    longer = replace(given.recipe, trainer=replace(given.recipe.trainer, max_tokens_per_rank=50))
    assert suggest._settings(longer, given.recipe) == "trainer.max_tokens_per_rank=50"


def judged(problems: list[str], **seconds) -> LayoutPlan:
    sent = Communication(**{"tensor_s": 0, "context_s": 0, "expert_s": 0, "pipeline_s": 0, "data_s": 0, **seconds})
    return SimpleNamespace(
        problems=problems, communication=sent, updates=2, training_s=100.0, work=SimpleNamespace(bubble=0.25),
        most_bytes=3 * GIB, step_s=110.0, fits=not problems, recipe=planned().recipe,
    )  # fmt: skip


def test_a_suggestion_says_what_keeps_it_from_fitting_or_takes_more_than_a_twentieth_of_its_time():
    def reason(*arguments, **seconds):
        return suggest.Suggestion(settings="", plan=judged(*arguments, **seconds)).reason

    assert reason(["too large", "too slow"], tensor_s=90.0) == "too large"
    assert reason([]) == "bubble 25%"
    # Of two updates.
    assert reason([], tensor_s=2.6, expert_s=20.0, data_s=2.4) == "bubble 25%; sending: tensor 5 s, expert 40 s"


def test_layouts_are_suggested_for_as_many_ranks_as_asked_for_and_built_as_planned():
    seen: list[tuple[int, int]] = []
    best, tried, ranks = suggest.suggest(
        planned(), Hardware(), gpus=4, count=2, seen=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert {total for _, total in seen} == {len(seen)}
    assert (len(best), ranks) == (2, 4)
    assert tried > 4
    for suggestion in best:
        recipe = suggestion.plan.recipe
        assert (recipe.trainer.num_ranks, recipe.rollout.num_engines) == (4, 2)
        assert suggestion.plan.fits
        assert suggestion.memory_gib == suggestion.plan.most_bytes / GIB
        assert suggestion.settings == suggest._settings(recipe, planned().recipe)
    first, second = (suggestion.plan for suggestion in best)
    assert suggest.ranked([second, first]) == [first, second]
    # Those of a recipe as large as it is, and without engines.
    alone, _, ranks = suggest.suggest(planned(sft=True), Hardware(), gpus=None, count=1, mean_tokens=60)
    assert ranks == 2
    assert alone[0].plan.batch.trajectory_tokens == 60
    assert (alone[0].plan.logprobs, alone[0].plan.engine_gpu, alone[0].plan.work.rollout_at_least_s) == (None, None, 0)
    # Nothing fits into so little, and the smallest need comes first.
    none, _, _ = suggest.suggest(planned(), Hardware(gpu_memory_gib=0.01, reserve_gib=0), gpus=2, count=3)
    needs = [suggestion.plan.most_bytes for suggestion in none]
    assert needs == sorted(needs)
    assert not any(suggestion.plan.fits for suggestion in none)


@pytest.mark.parametrize(
    ("given", "gpus", "count", "message"),
    [
        (planned(), 0, 1, "--gpus 0 --top 1: must be at least 1"),
        (planned(), 2, 0, "--gpus 2 --top 0: must be at least 1"),
        (planned(), 3, 1, "--gpus 3: engines of 2 GPUs do not fill those of the trainer"),
    ],
)
def test_a_number_of_gpus_that_cannot_be_is_refused(given, gpus, count, message):
    with pytest.raises(ValueError, match=message):
        suggest.suggest(given, Hardware(), gpus=gpus, count=count)


def test_a_prime_number_of_ranks_is_refused_where_no_layout_is_legal(monkeypatch):
    monkeypatch.setattr(suggest, "legal_layouts", lambda *about: iter([]))
    with pytest.raises(ValueError, match="--gpus 7: no legal layout; try a number with more divisors"):
        suggest.suggest(planned(transport=TransportName.p2p), Hardware(), gpus=7, count=1)


def test_a_whole_plan_of_a_toy_is_made_of_its_parts_and_takes_the_mean_length():
    made = plan.make_plan(planned(), Hardware(), mean_tokens=80)
    assert made.layout.fits
    assert made.layout.batch.trajectory_tokens == 80
    assert made.layout.layers == [[0, 1, 2]]
    # Engines are on the ranks' GPUs.
    assert (made.cluster.gpus, made.cluster.num_nodes) == (2, 1)
    assert made.step_s == made.layout.step_s + made.resync.seconds
    assert made.resync.sent_bytes == 2 * made.facts.parameters.total
    assert made.notes == plan._notes(made.planned, 80)
    uneven = planned(pipeline=2, megatron={"num_layers_in_last_pipeline_stage": 2}, transport=TransportName.p2p)
    assert plan.make_plan(uneven, Hardware()).layout.layers == [[0], [1, 2]]
    alone = plan.make_plan(planned(sft=True), Hardware())
    assert (alone.resync, alone.facts.engine, alone.cluster.gpus) == (None, None, 2)
    assert alone.step_s == alone.layout.step_s
    assert alone.layout.batch.trajectory_tokens == 100


def test_a_resync_counts_a_trained_layer_that_engines_draft_with_and_else_notes_that_it_is_left_out():
    given = replace(planned(), hf_config=toy_config("glm4_moe", ToySize(layers=3, hidden=32, experts=4, mtp_layers=1)))
    given.hf_config["vocab_size"] = 128
    plain = plan.make_plan(given, Hardware())
    given.recipe.trainer.mtp.train = True
    left_out = plan.make_plan(given, Hardware())
    given.recipe.rollout.speculative.mode = DraftMode.mtp
    sent = plan.make_plan(given, Hardware())
    specs = draft_specs(given.hf_config, "bfloat16")
    assert left_out.resync.sent_bytes == plain.resync.sent_bytes
    assert sent.resync.sent_bytes - plain.resync.sent_bytes == sum(map(spec_bytes, specs))
    assert [f"leaves out the {len(specs)} tensors" in made.notes[-1] for made in (plain, left_out, sent)] == [
        False, True, False,
    ]  # fmt: skip


def test_slots_of_a_resync_are_as_large_as_its_largest_bucket():
    given = planned()
    given.recipe.resync.transport = TransportName.disk
    given.recipe.resync.bucket_bytes = 5000
    known = model_facts(given)
    for precision, width in ((Precision.bf16, 2), (Precision.fp32, 4)):
        given.recipe.trainer.precision = precision
        buckets = buckets_of(known, given.recipe)
        assert sum(bucket.sent_bytes for bucket in buckets) == width * known.parameters.total
        assert 4900 < max(bucket.sent_bytes for bucket in buckets) <= 5000
        full = with_engines(known, given.recipe, buckets, Hardware(gpu_memory_gib=60, reserve_gib=8))
        room = round(52 * GIB * full.engine.mem_fraction_static) - full.engine.weights
        assert full.engine.kv_tokens == room // full.engine.kv_bytes_per_token
        assert width * known.parameters.total / 2 < full.engine.weights < width * known.parameters.total
    uneven = [
        SimpleNamespace(sent=(), sent_bytes=sent, gathered_bytes=gathered)
        for sent, gathered in ((100, 400), (300, 200))
    ]
    for transform, nbytes in ((None, NUM_SLOTS * 300), (object(), 400 + NUM_SLOTS * 300)):
        # What engines get quantised is gathered as it is first.
        found = with_engines(replace(known, transform=transform), given.recipe, uneven, Hardware())
        assert found.slot_bytes == nbytes
    assert (known.slot_bytes, known.engine, known.transform) == (0, None, None)
    total = width * known.parameters.total
    for transport, bucket_bytes, slot_bytes in (
        (TransportName.p2p, 5000, 5000),
        (TransportName.p2p, 10 * total, total),
        # Also what is staged for other nodes.
        (TransportName.ipc, 5000, 10000),
    ):
        given.recipe.resync.transport = transport
        given.recipe.resync.bucket_bytes = bucket_bytes
        buckets = buckets_of(known, given.recipe)
        assert [bucket.sent_bytes for bucket in buckets] == [total]
        assert with_engines(known, given.recipe, buckets, Hardware()).slot_bytes == slot_bytes
    given.recipe.resync.bucket_bytes = 100
    with pytest.raises(ValueError, match=r"resync.bucket_bytes: 100 bytes are too few: one row of"):
        buckets_of(known, given.recipe)


@pytest.fixture
def stub(monkeypatch):
    """The command without a planner: a plan and two suggestions, of which the second fits."""
    asked = {}
    layout = SimpleNamespace(fits=False)
    no, yes = (
        suggest.Suggestion(settings=name, plan=judged(problems)) for name, problems in (("a=1", ["no"]), ("b=2", []))
    )

    def make_plan(planned, hardware, *, mean_tokens):
        asked["plan"] = (planned, hardware, mean_tokens)
        return SimpleNamespace(layout=layout, problems=[] if layout.fits else ["too large"])

    def suggestions(planned, hardware, **settings):
        asked["suggest"] = (planned, hardware, settings)
        return [no, yes][: settings["count"]], 17, 8

    given = planned()
    monkeypatch.setattr(command, "intended_command", lambda path, overrides: f"that of {path} {overrides}")
    monkeypatch.setattr(command, "read_offline", lambda *read: asked.update(read=read) or given)
    monkeypatch.setattr(plan, "make_plan", make_plan)
    monkeypatch.setattr(plan, "as_json", lambda made: {"fits": made.layout.fits})
    monkeypatch.setattr(suggest, "suggest", suggestions)
    monkeypatch.setattr("slimrl.estimates.planner.tables.print_plan", lambda made: print("a table"))

    def run(**settings):
        options = {"mean_tokens": None, "suggestions_wanted": False, "gpus": None, "top": 5, "to_json": False}
        return command.run("recipe.yaml", ["a=b"], HARDWARE, **{**options, **settings})

    return SimpleNamespace(run=run, asked=asked, layout=layout, given=given)


HARDWARE = Hardware()


def test_the_command_plans_what_it_is_given_and_says_whether_it_fits(stub, capsys, monkeypatch):
    assert not stub.run(to_json=True, mean_tokens=100)
    assert json.loads(capsys.readouterr().out) == {"fits": False}
    assert stub.asked == {
        "read": ("recipe.yaml", ["a=b"], "that of recipe.yaml ['a=b']"),
        "plan": (stub.given, HARDWARE, 100),
    }
    stub.layout.fits = True
    keys = ("data.train", "rollout.num_engines", "trainer.parallel.tensor", "trainer.fp8")
    notes = tuple(Problem(key=key, message="of a kind.", where="a.yaml", warning=True) for key in keys)
    monkeypatch.setattr(command, "read_offline", lambda *read: replace(stub.given, notes=notes))
    assert stub.run()
    shown = capsys.readouterr()
    assert shown.out == "a table\n"
    assert [line.split(": ")[1] for line in shown.err.splitlines()] == [
        "rollout.num_engines",
        "trainer.parallel.tensor",
    ]
    assert stub.asked["plan"][2] is None


def test_the_command_suggests_layouts_and_says_whether_one_of_them_fits(stub, capsys):
    assert stub.run(suggestions_wanted=True, gpus=8, top=2, to_json=True, mean_tokens=1)
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["legal_layouts"]) == (8, 17)
    *given, settings = stub.asked["suggest"]
    settings.pop("seen")(3, 17)
    assert (given, settings) == ([stub.given, HARDWARE], {"gpus": 8, "count": 2, "mean_tokens": 1})
    first, second = found["suggestions"]
    assert first == {
        "settings": "a=1",
        "layout": vars(stub.given.recipe.trainer.parallel),
        "memory_gib": 3.0,
        "step_seconds_without_resync": 110.0,
        "fits": False,
        "reason": "no",
    }
    assert (second["settings"], second["fits"]) == ("b=2", True)
    assert not stub.run(suggestions_wanted=True, top=1)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "1", "1", "1", "1", "100", "none", "3.0", "110.0", "no", "no"] in rows
    assert rows[-1] == ["1:", "a=1"]


def test_suggestions_for_people_show_their_sizes_in_order(capsys):
    shown = judged([])
    shown.recipe = suggest._with_layout(
        planned(), ParallelConfig(tensor=2, context=3, pipeline=4, expert=5), [[0]], 24, FULL
    )
    print_suggestions([suggest.Suggestion(settings="a=1 b=2", plan=shown)], 9, 24)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "9 legal layouts of 24 trainer ranks, the best first"
    assert "1 2 3 4 5 34 full 3.0 110.0 yes bubble 25%" in lines
    assert lines[-1] == "1: a=1 b=2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean_tokens": 0}, "--mean-tokens 0: must be at least 1"),
        ({"mean_tokens": 101}, "--mean-tokens 101: the recipe allows at most 100"),
        ({"gpus": 4}, "--gpus goes with --suggest. A plan is for the recipe's trainer.num_ranks."),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_planned(stub, settings, message):
    with pytest.raises(ValueError, match=message):
        stub.run(**settings)
    assert not {"plan", "suggest"} & stub.asked.keys()


def test_the_longest_that_a_recipe_trains_on_is_a_conversation_or_a_trajectory():
    given = planned()
    given.recipe.rollout.max_trajectory_tokens = 300
    assert longest_tokens(given.recipe, sft=False) == 300
    assert longest_tokens(given.recipe, sft=True) == 100


def test_a_recipe_is_planned_as_the_command_that_it_is_for():
    recipes = Path(__file__).parents[2] / "recipes" / "qwen3_moe"
    for name, sft in (("qwen3_30b_a3b_sft.yaml", True), ("qwen3_30b_a3b_gspo.yaml", False)):
        found = read_offline(recipes / name, ["seed=5"], intended_command(recipes / name, ["seed=5"]))
        assert (found.sft, found.recipe.seed, found.hf_config["num_experts"]) == (sft, 5, 128)
        assert "Qwen3-30B-A3B" in found.model
