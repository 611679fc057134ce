"""`slimrl plan` on the recipes as they are shipped."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.load import intended_command, read_recipe
from slimrl.toys.toy_configs import TOYS, ToySize

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(str(p.relative_to(RECIPES)) for p in RECIPES.glob("*/*.yaml") if p.parent.name != "base")
QUICK = [
    "qwen3_moe/qwen3_30b_a3b_gspo.yaml",
    "qwen3_moe/qwen3_30b_a3b_gspo_fp8_training.yaml",
    "tiny_moe/sft.yaml",
]
QWEN = str(RECIPES / QUICK[0])
LARGER_GPUS = {
    "qwen3_5_397b": 140,
    "kimi_k2_gspo": 179,
    "kimi_k2_5": 140,
    "deepseek_v3_gspo_h100": 80,
    "deepseek_v3_gspo": 140,
    "glm_4_5_gspo": 140,
    "hy3": 140,
    "deepseek_v32_gspo": 140,
    "glm_5_gspo": 140,
}
"""GiB of a B200 and of an H200, for recipes that say that they are for one; the first name that a file begins with."""
PARTS = {"weights", "gradients", "optimizer", "activations", "logits", "resync", "engine_weights", "kv_cache"}


def plan(*arguments: str) -> dict:
    """What is printed, whatever the exit code says of whether it fits."""
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["fits"] else 1)
    return found


def gpu_memory_gib(recipe: str) -> int:
    return next((gib for name, gib in LARGER_GPUS.items() if Path(recipe).name.startswith(name)), 80)


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.fixture
def toy_model(tmp_path: Path) -> Path:
    """A folder with the config.json of the toy model alone."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TOYS["qwen3_moe"](ToySize()) | {"vocab_size": 512}))
    return folder


@pytest.mark.full
def test_deepseek_v3_in_bf16_fits_with_engines_of_sixteen_gpus_on_two_nodes():
    recipe = str(RECIPES / "deepseek_v3" / "deepseek_v3_gspo_disaggregated.yaml")
    sizes = ["rollout.num_engines=4", "rollout.engine_tp=16", "rollout.engine_ep=16", "rollout.engine_attention_dp=1"]
    given = ["model.path=models/DeepSeek-V3-BF16", *sizes]
    memory = ["--gpu-memory-gib", str(LARGER_GPUS["deepseek_v3_gspo"])]
    found = plan(recipe, *given, "rollout.engine_nodes=2", *memory)
    assert found["fits"], found["problems"]
    # 128 GPUs of the trainer and 4 x 16 of engines, whole nodes of 8.
    assert (found["gpus"], found["nodes"]) == (192, 24)
    # Two bytes for each parameter, a sixteenth on each GPU; what all ranks hold comes on top.
    least = 2 * 671_026_419_200 / 16 / 2**30
    assert least < found["memory_gib"]["engine_weights"] < 1.05 * least
    assert "each engine is on one node" in refusal(recipe, *given, *memory)


OFFLOADED = (
    "qwen3_moe/qwen3_30b_a3b_gspo", "qwen3_moe/qwen3_30b_a3b_sft", "qwen3_moe/qwen3_235b_a22b_gspo",
    "qwen3_next/qwen3_next_80b_a3b_gspo", "glm4_moe/glm_4_5_air_gspo", "deepseek_v3/moonlight_16b_a3b_gspo",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [OFFLOADED[0], *(pytest.param(name, marks=pytest.mark.full) for name in OFFLOADED[1:])]
)
def test_gpus_of_140_gib_hold_the_optimizer_that_others_leave_to_the_host(name):
    path, here = str(RECIPES / f"{name}.yaml"), "trainer.megatron.optimizer_cpu_offload=false"
    on_gpu = plan(path, here, "--gpu-memory-gib", "140")
    assert on_gpu["fits"], on_gpu["problems"]
    on_host = plan(path, "--gpu-memory-gib", "140")
    assert on_gpu["memory_gib"]["optimizer"] > on_host["memory_gib"]["optimizer"]
    assert on_gpu["step_seconds"] < on_host["step_seconds"]


@pytest.mark.full
def test_only_adapters_have_gradients_and_optimizer_states():
    on_gpu = ["trainer.megatron.optimizer_cpu_offload=false", "--gpu-memory-gib", "140"]
    whole, found = plan(QWEN, *on_gpu), plan(QWEN, "trainer.lora.rank=16", *on_gpu)
    sizes, before, after = found["parameters"]["adapters_per_stage"], whole["memory_gib"], found["memory_gib"]
    assert found["parameters"]["per_stage"] == whole["parameters"]["per_stage"]
    stage = sizes[after["stage"]]
    assert stage < 0.05 * whole["parameters"]["per_stage"][after["stage"]]
    assert after["gradients"] == pytest.approx(4 * stage / 2**30, rel=0.02)
    assert after["weights"] - before["weights"] == pytest.approx(2 * stage / 2**30, rel=0.05, abs=2**-10)
    assert after["optimizer"] < 0.05 * before["optimizer"]
    assert any("upper bounds" in note for note in found["notes"])
    assert "adapters_per_stage" not in whole["parameters"]


@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SHIPPED]
)
def test_every_recipe_is_planned_in_half_a_minute(recipe, toy_model):
    path = RECIPES / recipe
    overrides = [f"model.path={toy_model}"] if "tiny_moe" in recipe or "smollm2" in recipe else []
    loaded, _ = read_recipe(path, overrides, intended_command(path, overrides))
    assert loaded is not None
    start = time.monotonic()
    found = plan(str(path), *overrides, "--gpu-memory-gib", str(gpu_memory_gib(recipe)))
    assert time.monotonic() - start < 30
    assert found["world_size"] == loaded.recipe.trainer.num_ranks
    parameters, memory = found["parameters"], found["memory_gib"]
    assert 0 < parameters["active"] <= parameters["total"]
    assert parameters["per_rank_min"] <= parameters["per_rank_max"] <= parameters["total"]
    # All ranks together hold the model at least once.
    parallel = found["layout"]
    ranks = parallel["tensor"] * parallel["expert"] * parallel["expert_tensor"]
    assert sum(parameters["per_stage"]) * ranks >= parameters["total"]
    assert memory.keys() >= PARTS | {"total", "limit"}
    rollout_s, resync_s = found["step"].pop("rollout_at_least"), found["step"].pop("resync")
    # Where engines sample while the trainer trains, a step takes the longer of the two.
    together = max if found["overlaps"] else sum
    assert found["step_seconds"] == pytest.approx(together([rollout_s, sum(found["step"].values())]) + resync_s)
    assert (found["resync"] is None) == ("sft" in recipe)
    assert found["fits"], found["problems"]


@pytest.mark.full
def test_attention_data_parallelism_gives_an_engine_of_deepseek_v3_five_times_the_cache():
    """A rank's latent cache of bf16 is as large per token; attention, eight times on a GPU, takes a third of it."""
    recipe = str(RECIPES / "deepseek_v3" / "deepseek_v3_gspo.yaml")
    memory = ["--gpu-memory-gib", str(LARGER_GPUS["deepseek_v3_gspo"])]
    one, groups = (plan(recipe, f"rollout.engine_attention_dp={number}", *memory) for number in (1, 8))
    # 61 layers of attention in FP8 (q_b, kv_b and o are cut by heads), and the embedding in bf16.
    cut = 61 * 128 * (1536 * 192 + 512 * 256 + 128 * 7168) + 2 * 129280 * 7168
    more = (groups["memory_gib"]["engine_weights"] - one["memory_gib"]["engine_weights"]) * 2**30
    assert more == pytest.approx(cut * 7 / 8, rel=1e-3)
    freed = one["memory_gib"]["kv_cache"] - groups["memory_gib"]["kv_cache"]
    assert freed * 2**30 == pytest.approx(more, rel=1e-3)
    tokens = 8 * groups["memory_gib"]["kv_cache"] / one["memory_gib"]["kv_cache"]
    assert groups["kv_cache_tokens"] / one["kv_cache_tokens"] == pytest.approx(tokens, rel=1e-3)
    assert tokens > 5
    assert groups["step_seconds"] < one["step_seconds"]


def test_a_recipe_with_less_memory_does_not_fit_and_says_what_takes_it():
    found = plan(QWEN, "--gpu-memory-gib", "24", "--host-memory-gib", "300")
    assert not found["fits"]
    assert any("train, stage 0" in problem and "GiB of 24" in problem for problem in found["problems"])
    assert any("start, stage 0" in problem for problem in found["problems"])
    # Weights and optimizer states of eight ranks, with the gradients that the optimizer reads, 64 GiB each; and what
    # a save gathers of them, 452 GiB.
    assert any("host memory of a node: 967 GiB of 300" in problem for problem in found["problems"])
    assert found["memory_gib"]["phases"]["start"] > 24


def test_engines_over_ipc_without_a_hand_over_are_planned_on_the_trainers_gpus_which_hold_both():
    shared, kept = plan(QWEN), plan(QWEN, "rollout.colocated=false")
    assert shared["gpus"] == kept["gpus"] == 8
    assert shared["nodes"] == kept["nodes"] == 1
    assert kept["memory_gib"]["engine_gpu"] is None
    assert kept["memory_gib"]["total"] > sum(
        shared["memory_gib"][name] for name in ("weights", "gradients", "kv_cache")
    )
    assert not kept["fits"]
    assert any("both keep" in note for note in kept["notes"])


def test_engines_of_a_node_that_the_trainer_leaves_half_empty_need_no_network():
    found = plan(str(RECIPES / "qwen3/qwen3_4b_gspo_disaggregated.yaml"))
    assert (found["gpus"], found["nodes"]) == (8, 1)
    assert "network" not in found["resync"]["links"]


def test_fewer_tokens_make_a_shorter_step_and_other_links_a_longer_one():
    whole, half = plan(QWEN), plan(QWEN, "--mean-tokens", "5120")
    assert half["work"]["training_s"] < 0.51 * whole["work"]["training_s"]
    slow = plan(QWEN, "--nvlink-gb-per-s", "45")
    assert slow["update_communication"]["tensor_s"] == pytest.approx(10 * whole["update_communication"]["tensor_s"])
    # Half of the attention's weights lies on another GPU than where engines keep it.
    assert slow["resync"]["seconds"] > whole["resync"]["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QWEN, "trainer.parallel.expert=3"], "trainer.parallel.expert: 3 does not divide the model's 128 experts"),
        ([QWEN, "trainer.parallel.sequence=false"], "needs sequence: true"),
        ([QWEN, "trainer.num_ranks=12"], "does not divide trainer.num_ranks 12"),
        ([QWEN, "model.path=models/nothing"], "'nothing' is none of"),
        (
            [QWEN, "model.path=models/Qwen3-Next-80B-A3B", "trainer.parallel.tensor=2", "trainer.parallel.context=16"],
            "tensor 2 x context 16 = 32 does not divide the model's 16 key heads of linear attention",
        ),
        ([QWEN, "--mfu", "2"], "--mfu 2.0: must be at most 1"),
        ([QWEN, "--gpus", "16"], "--gpus goes with --suggest"),
        ([QWEN, "--mean-tokens", "0"], "--mean-tokens 0: must be at least 1"),
        ([QWEN, "--suggest", "--gpus", "0"], "--gpus 0"),
        ([QWEN, "--suggest", "--gpus", "13"], "--gpus 13: engines of 8 GPUs do not fill those of the trainer"),
    ],
)
def test_what_cannot_be_is_refused_by_the_rule_that_it_breaks(arguments, message):
    assert message in refusal(*arguments)


@pytest.mark.full
def test_suggestions_are_legal_fit_and_are_planned_as_suggested():
    result = CliRunner().invoke(app, ["plan", QWEN, "--suggest", "--gpus", "16", "--top", "3", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["gpus"] == 16
    assert found["legal_layouts"] > 20
    best, *others = found["suggestions"]
    assert best["fits"]
    seconds = [suggestion["step_seconds_without_resync"] for suggestion in (best, *others) if suggestion["fits"]]
    # Of those within 5% of the fastest the smallest is first.
    assert seconds[0] <= 1.05 * min(seconds)
    again = plan(QWEN, *best["settings"].split())
    assert again["fits"]
    assert again["memory_gib"]["total"] == pytest.approx(best["memory_gib"], rel=1e-6)
    assert again["step_seconds"] - again["step"]["resync"] == pytest.approx(seconds[0], rel=1e-6)


def test_a_plan_for_people_has_its_tables():
    result = CliRunner().invoke(app, ["plan", QWEN])
    assert result.exit_code == 0, result.output
    for text in ("30,532,122,624", "groups: tensor 4", "kv_cache", "pipeline bubble", "resync", "it fits"):
        assert text in result.stdout
