"""Hints of unknown keys: names that other programs give a setting, and slips of the keyboard; never a mere likeness."""

import re

import pytest
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.algorithm_rules import algorithm_violations
from slimrl.config.aliases import (
    ALIASES,
    DATA,
    NO_SETTINGS,
    RANKS,
    RECOMPUTE,
    TOKENS,
    UPDATES,
    WITHOUT_SECTION,
    alias_of,
)
from slimrl.config.hints import meant_key
from slimrl.config.keys import KEY_TYPES, is_known
from slimrl.config.load import read_recipe

FIRST = re.compile(r"(?P<key>[\w.]+)(?:: (?P<value>\w+))?(?: \([^()]+\))?")

ONCE = "trainer.updates_per_rollout (updates of a step; each trajectory is in one of them)"


@pytest.mark.parametrize("meant", sorted({*ALIASES.values(), *WITHOUT_SECTION.values()}))
def test_each_alias_stands_for_a_setting_that_exists_and_takes_its_value(meant: str):
    found = FIRST.fullmatch(meant)
    assert found is not None
    assert is_known(found["key"])
    if found["value"]:
        # Refused for what else it lacks, but not for this.
        _, problems = read_recipe("recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml", [f"{found['key']}={found['value']}"])
        assert [str(one) for one in problems] == []


def test_no_alias_is_a_name_of_ours():
    names = {key.rpartition(".")[2] for key in KEY_TYPES}
    assert [alias for alias in (*ALIASES, *NO_SETTINGS) if alias in names or alias in KEY_TYPES] == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("algorithm.advantage_estimator", "algorithm.name"),
        ("rollout.max_response_len", "rollout.sampling.max_new_tokens (of a turn)"),
        ("rollout.num_gpus_per_engine", "rollout.engine_tp"),
        ("model.name", "model.path"),
        ("algorithm.eps_clip", "algorithm.clip_low"),
        ("eps-clip-high", "algorithm.clip_high"),
        ("algorithm.use_tis", "algorithm.correction.level: token"),
        ("checkpoint.save_interval", "checkpoint.every_steps"),
        ("trainer.save_freq", "checkpoint.every_steps"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("trainer.tp", "trainer.parallel.tensor"),
        ("tp", "trainer.parallel.tensor"),
        ("rollout.tp", "rollout.engine_tp"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.engine_tp"),
        ("teacher.tp_size", "teacher.engine_tp"),
        ("critic.trainer.tp", "critic.trainer.parallel.tensor"),
        ("critic.learning_rate", "critic.trainer.optimizer.lr"),
        ("critic.trainer.lr", "critic.trainer.optimizer.lr"),
        ("actor_rollout_ref.actor.optim.lr", "trainer.optimizer.lr"),
        ("trainer.optimizer.warmup_steps", "trainer.optimizer.warmup_updates"),
        ("rollout.mem_fraction_static", "rollout.sglang.mem_fraction_static"),
        ("mem_fraction_static", "rollout.sglang.mem_fraction_static"),
        ("rollout.mem_fraction", "rollout.sglang.mem_fraction_static"),
        ("trainer.recompute_granularity", "trainer.megatron.recompute_granularity"),
        ("rollout.temperature", "rollout.sampling.temperature"),
        ("rollout.steps", "steps"),
        ("rollout.lr", "trainer.optimizer.lr"),
        ("engine_tp", "rollout.engine_tp"),
        ("agent.max_turns", "rollout.max_turns"),
        ("agent.max_steps", "rollout.max_turns"),
        ("eval.every", "eval.every_steps"),
        ("rollout.prompts", "rollout.prompts_per_step"),
        ("sede", "seed"),
        ("max_tokens", WITHOUT_SECTION["max_tokens"]),
        ("algorithm.clip_hgih", "algorithm.clip_high"),
        ("algorithm.kl_coeff", "algorithm.kl_coef"),
        ("reward.parts.math.wieght", "reward.parts.math.weight"),
        # Several sections have one, or what is alike means something else.
        ("trainer.mode", None),
        ("reward.path", None),
        ("algorithm.keep", None),
        ("algorithm.advantage_estimate", None),
        ("rollout.max_reply_len", None),
        ("rollout.num_gpu_per_engines", None),
        ("eval.n_samples_per_prompt", "eval.samples_per_prompt"),
        ("eval.n", "eval.samples_per_prompt"),
        ("eval.num_samples", "eval.samples_per_prompt"),
        ("eval.interval", "eval.every_steps"),
        ("rollout.num_gpus", "rollout.num_engines (each has rollout.engine_tp GPUs)"),
        ("rollout.dp", "rollout.num_engines (each has rollout.engine_tp GPUs)"),
        ("trainer.num_gpus", RANKS),
        ("trainer.gradient_accumulation_steps", TOKENS),
        ("micro_batch_size_per_gpu", TOKENS),
        ("trainer.use_dynamic_batch_size", TOKENS),
        ("trainer.mini_batch_size", UPDATES),
        ("rollout.sampling.stop", None),
        ("trainer.parallel.data", DATA),
        ("trainer.parallel.dp", DATA),
        ("trainer.parallel.sp", "trainer.parallel.sequence"),
        ("trainer.parallel.vpp", "trainer.parallel.virtual_pipeline"),
        ("custom_reward_function.path", "reward.function (written module:function)"),
        ("trainer.optimizer.betas", "trainer.optimizer.beta1 (and beta2)"),
        ("critic.gamma", "critic.discount"),
        ("tracking.project", "tracking.wandb_project"),
        ("run.output_dir", "run.dir"),
        ("output_dir", "run.dir"),
        ("save", "run.dir"),
        ("checkpoint.dir", "run.dir (a run's folder there holds its checkpoints)"),
        ("model.name_or_path", "model.path"),
        ("model.load", "model.path"),
        ("epochs", "steps (each takes rollout.prompts_per_step prompts)"),
        ("trainer.gradient_checkpointing", RECOMPUTE),
        ("trainer.recompute", RECOMPUTE),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("algorithm.kl_beta", "algorithm.kl_coef"),
        ("algorithm.epsilon", "algorithm.clip_low"),
        ("algorithm.cliprange", "algorithm.clip_low"),
        ("algorithm.ppo_epochs", ONCE),
        ("algorithm.num_iterations", ONCE),
        ("rollout.batch_size", "rollout.prompts_per_step"),
        ("rollout.num_prompts", "rollout.prompts_per_step"),
        ("rollout.sampling.n", "rollout.samples_per_prompt"),
        ("zebra", None),
    ],
)
def test_a_hint_names_what_was_meant_or_nothing(key: str, meant: str | None):
    assert meant_key(key) == meant


def test_the_longest_end_of_a_key_decides():
    assert alias_of("x.rollout.tp") == "rollout.engine_tp"
    assert alias_of("x.model.tp") == "trainer.parallel.tensor"
    assert alias_of("rollout.num_engines") is None


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("resume", "It is an option of the command: --resume."),
        ("trainer.optimizer.name", "The optimizer is Adam."),
        ("trainer.optimizer.type", "The optimizer is Adam."),
        (
            "teacher.temperature",
            "A teacher scores tokens at temperature 1; rollout.sampling.temperature, the policy's, must be 1 too.",
        ),
        (
            "teacher.threads_per_engine",
            "A teacher's engines have the threads of rollout.threads_per_engine. Leave the line out.",
        ),
        (
            "rollout.sampling.stop",
            "Keys of rollout.sampling: temperature, top_p, top_k, max_new_tokens, ignore_end_of_turn.",
        ),
        (
            "tracking.zebra.stripes",
            "Keys of tracking: wandb, wandb_project, more, prometheus, opentelemetry, texts, "
            "trajectories_per_step, recorded_trajectories_per_step, recorded_bytes.",
        ),
        ("reward.parts.math.zebra", "Keys of reward.parts.math: function, weight, cap, args, verified."),
        ("zebra", ""),
    ],
)
def test_where_no_setting_was_meant_the_message_says_what_there_is(key: str, said: str):
    _, problems = read_recipe("recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml", [f"{key}=1"])
    assert [one.message for one in problems if one.key == key] == [f"no such key. {said}".rstrip()]


def test_a_field_of_megatron_that_a_recipe_sets_elsewhere_names_that_setting():
    _, problems = read_recipe("recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml", ["trainer.megatron.seq_length=1024"])
    (problem,) = problems
    assert "rollout.max_trajectory_tokens" in problem.message


def messages(overrides: list[str]) -> list[tuple[str, str]]:
    """(key, message) of what a recipe is told."""
    _, problems = read_recipe("recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml", overrides)
    return [(problem.key, problem.message) for problem in problems]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("algorithm.adv_estimator=gae", "no such key. Did you mean algorithm.name: ppo?"),
        ("algorithm.name=gae", "Did you mean ppo?"),
        ("algorithm.name=reinforce_plus_plus", "Did you mean reinforce_pp?"),
        ("algorithm.loss=vanilla", "Did you mean ppo?"),
        ("resync.transport=nccl", "Did you mean p2p?"),
        ("trainer.total_epochs=2", "no such key. Did you mean steps (each takes rollout.prompts_per_step prompts)? "),
        ("trainer.esi_redundant_time=2", "no such key. Did you mean checkpoint.grace_s? See preemption."),
        ("trainer.device=cuda", "has no counterpart. GPUs where there are any, else CPUs."),
        ("trainer.resume_mode=auto", "Did you mean slimrl train RECIPE --resume"),
    ],
)
def test_a_name_or_a_value_of_slime_or_verl_is_told_what_it_is_here(given: str, said: str):
    key = given.partition("=")[0]
    loaded, problems = read_recipe("recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml", [given])
    told = [(problem.key, problem.message) for problem in problems]
    told += [] if told or loaded is None else algorithm_violations(loaded.recipe)
    (message,) = [message for told_of, message in told if told_of == key]
    assert said in message


def test_each_key_of_nested_sections_of_verl_has_its_line_and_its_hint(tmp_path):
    recipe = tmp_path / "verl.yaml"
    recipe.write_text("actor_rollout_ref:\n  rollout:\n    n: 4\n    name: sglang\n  zebra: {a: 1}\n")
    _, problems = read_recipe(recipe)
    told = [(problem.where.rpartition(":")[2], problem.key, problem.message) for problem in problems][:3]
    assert told == [
        (
            "3",
            "actor_rollout_ref.rollout.n",
            "no such key. Did you mean rollout.samples_per_prompt? 1 in verl.",
        ),
        ("4", "actor_rollout_ref.rollout.name", "no such key. It is verl's and has no counterpart. SGLang."),
        ("5", "actor_rollout_ref.zebra", "no such key."),
    ]
    same = ["actor_rollout_ref={rollout: {n: 4}}", "data={max_response_length: 8}", "algorithm={kl_ctrl: {type: x}}"]
    assert [key for key, _ in messages(same)] == [
        "actor_rollout_ref.rollout.n",
        "algorithm.kl_ctrl.type",
        "data.max_response_length",
    ]


@pytest.mark.parametrize("empty", ["{}", "null", "3"])
def test_an_empty_section_of_verl_is_an_unknown_key_too(empty: str):
    assert [key for key, _ in messages([f"actor_rollout_ref={empty}"])] == ["actor_rollout_ref"]


def test_unknown_keys_come_before_what_is_missing(tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text("model:\n  pth: x\nstps: 3\n")
    _, problems = read_recipe(recipe)
    assert [problem.key for problem in problems][:2] == ["model.pth", "stps"]
    assert all(problem.message.startswith("missing") for problem in problems[2:])
    assert {"model.path", "steps"} <= {problem.key for problem in problems[2:]}


def test_a_setting_in_hydras_manner_is_told_how_it_is_written_here():
    said = "the + is Hydra's. Leave it away: steps=VALUE adds as well as replaces."
    assert messages(["+steps=3"]) == [("+steps", said)]
    assert messages(["++steps=3"]) == [("++steps", said)]
    assert [key for key, _ in messages(["+algorithm.adv_estimator=gae"])] == [
        "+algorithm.adv_estimator",
        "algorithm.adv_estimator",
    ]
    assert messages(["~steps"]) == [("~steps", "the ~ is Hydra's: give the setting another value.")]
    for key in ("data.eval.heldout", "reward.parts.exact", "data.weights.train"):
        assert messages([f"~{key}"]) == [(f"~{key}", f"the ~ is Hydra's: {key}=null removes it.")]
    assert messages(["+=3"])[-1] == ("+=3", "an override is written key=value.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--rollout-batch-size", "32"], "--rollout-batch-size. Did you mean rollout.prompts_per_step?"),
        (["sft", "--lr=1e-6"], "--lr. Did you mean trainer.optimizer.lr?"),
        (["train", "--advantage-estimator", "reinforce_plus_plus"], "Did you mean algorithm.name: reinforce_pp?"),
        (["plan", "--rollout.max_turns", "3"], "--rollout.max_turns. It is a setting: rollout.max_turns=3."),
        (["config", "check", "--balance-data"], "It is slime's and has no counterpart."),
        (["eval", "--zebra"], "No such option: --zebra"),
    ],
)
def test_an_option_of_slime_is_told_what_it_is_here(arguments: list[str], said: str):
    result = CliRunner().invoke(app, [*arguments, "recipe.yaml"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert result.exit_code == 2
    assert said in result.output
    assert ("as KEY=VALUE" in result.output) == ("zebra" not in said)
