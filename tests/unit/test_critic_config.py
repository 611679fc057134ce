"""The section `critic` of a recipe: what it takes over from the trainer, how it is written down, and its rules."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from recipe_problems import recipe_problems

from slimrl.config.critic import critic_recipe
from slimrl.config.keys import flatten
from slimrl.config.load import NOT_NEEDED, Command, LoadedRecipe, load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.trainer import LoraConfig, MtpConfig, TrainerConfig
from slimrl.config.show import dump_resolved, resolved_dict, show

GIVEN = """\
steps: 3
run: {name: demo}
model: {path: models/toy}
trainer:
  num_ranks: 4
  max_tokens_per_rank: 512
  optimizer: {lr: 1e-6}
  parallel: {tensor: 2, sequence: true}
  megatron: {moe_router_dtype: fp64, recompute_granularity: selective, recompute_modules: [moe_act, mlp]}
  env: {NCCL_DEBUG: INFO, HF_TOKEN: "${oc.env:SLIMRL_TEST_SECRET}"}
algorithm: {name: ppo, max_logprob_mismatch: 1e-4}
rollout:
  max_trajectory_tokens: 256
  sampling: {max_new_tokens: 64}
  eval_sampling: {max_new_tokens: 64}
reward: {function: "tasks.demo:reward"}
data: {train: data/train.jsonl}
sft: {max_tokens: 256}
"""

SECRET = "s3cr3t-0123456789"

OWN = (
    "critic.trainer.num_ranks=2",
    "critic.trainer.optimizer.lr=1e-5",
    "critic.trainer.megatron.moe_router_dtype=fp32",
    "critic.trainer.megatron.attention_dropout=0.5",
    "critic.trainer.env.NCCL_DEBUG=WARN",
    "critic.trainer.env.ONLY_HERE=1",
)

MODEL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 6144,
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIMRL_TEST_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(GIVEN)


def load(*overrides: str, command: Command = "train") -> LoadedRecipe:
    return load_recipe("recipe.yaml", overrides, command)


def own_keys(loaded: LoadedRecipe) -> set[str]:
    return {key for key, _ in flatten(loaded.recipe) if key.startswith("critic.trainer.")}


def problems_of(*overrides: str, command: Command = "train", model: dict | None = MODEL) -> list[tuple[str, str]]:
    """Key and message of each problem that is no warning."""
    found = recipe_problems("recipe.yaml", overrides, model, command)
    return [(p.key, p.message) for p in found if not p.warning]


def test_the_critic_s_ranks_have_the_trainer_s_settings_where_it_has_none_of_its_own():
    assert load().recipe.critic.trainer == load().recipe.trainer
    assert load().recipe.trainer != TrainerConfig()
    found = load(*OWN)
    trainer = found.recipe.trainer
    assert found.recipe.critic.trainer == replace(
        trainer,
        num_ranks=2,
        optimizer=replace(trainer.optimizer, lr=1e-5),
        megatron={**trainer.megatron, "moe_router_dtype": "fp32", "attention_dropout": 0.5},
        env={"NCCL_DEBUG": "WARN", "HF_TOKEN": SECRET, "ONLY_HERE": "1"},
    )
    # The trainer has none of them.
    assert trainer == load().recipe.trainer


def test_settings_of_its_own_say_where_they_come_from_and_shared_ones_are_not_repeated():
    assert own_keys(load()) == set()
    found = load(*OWN)
    assert own_keys(found) == {override.partition("=")[0] for override in OWN}
    origins = {key: origin for key, _, origin in show(found) if key.startswith("critic.")}
    assert {key for key, origin in origins.items() if origin == "command line"} == own_keys(found)
    assert {key for key, origin in origins.items() if origin == "default"} == {
        f"critic.{name}" for name in ("discount", "gae_lambda", "value_clip", "warmup_steps")
    }


def test_a_setting_that_is_given_with_the_trainer_s_value_is_shown_with_its_own_place():
    given = f"critic.trainer.num_ranks={load().recipe.trainer.num_ranks}"
    found = load(given)
    assert [origin for key, _, origin in show(found) if key == "critic.trainer.num_ranks"] == ["command line"]
    assert resolved_dict(found)["critic"]["trainer"] == {"num_ranks": found.recipe.trainer.num_ranks}
    assert found.where("critic.trainer.num_ranks") == "command line"
    assert found.where("critic.trainer.optimizer.lr") == found.where("trainer.optimizer.lr")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        OWN,
        # Values that are the schema's defaults, or those of the trainer.
        ("critic.trainer.parallel.tensor=1", "critic.trainer.parallel.sequence=false", "critic.trainer.num_ranks=4"),
        ("critic.trainer.env.HF_TOKEN=${trainer.env.HF_TOKEN}-of-the-critic", "critic.gae_lambda=0.95"),
        ("algorithm.name=grpo",),
    ],
)
def test_a_resolved_recipe_is_read_back_as_an_equal_one(overrides: tuple[str, ...]):
    first = load(*overrides)
    Path("resolved.yaml").write_text(dump_resolved(first))
    again = load_recipe("resolved.yaml")
    assert asdict(again.recipe) == asdict(first.recipe)
    assert resolved_dict(again) == resolved_dict(first)
    # Whoever changes the trainer in it changes the critic too.
    changed = load_recipe("resolved.yaml", ["trainer.optimizer.eps=1e-4"]).recipe
    assert changed.critic.trainer.optimizer.eps == 1e-4


@pytest.mark.parametrize("secret", [SECRET, "s3cr3t-${0123}456789"])
@pytest.mark.parametrize("own", ["", "critic.trainer.env.ITS_TOKEN=${oc.env:SLIMRL_TEST_SECRET}"])
def test_the_critic_gets_the_trainer_s_secrets_and_none_is_written_down(monkeypatch, secret: str, own: str):
    monkeypatch.setenv("SLIMRL_TEST_SECRET", secret)
    found = load(*filter(None, [own]))
    assert found.recipe.trainer.env["HF_TOKEN"] == secret
    tokens = {name: value for name, value in found.recipe.critic.trainer.env.items() if name.endswith("_TOKEN")}
    assert tokens == dict.fromkeys(("HF_TOKEN", "ITS_TOKEN") if own else ("HF_TOKEN",), secret)
    written = resolved_dict(found)["critic"]
    assert written.get("trainer", {}) == ({"env": {"ITS_TOKEN": "${oc.env:SLIMRL_TEST_SECRET}"}} if own else {})
    for text in (dump_resolved(found), str(show(found))):
        assert "s3cr3t" not in text
        assert "456789" not in text


def test_a_text_with_the_two_characters_of_a_reference_is_the_critic_s_too():
    escaped = yaml.safe_load(GIVEN)
    escaped["trainer"]["env"]["PATTERN"] = r"a\${b}"
    Path("recipe.yaml").write_text(yaml.safe_dump(escaped))
    for overrides in ((), ("algorithm.name=grpo",)):
        found = load(*overrides)
        assert found.recipe.critic.trainer.env["PATTERN"] == found.recipe.trainer.env["PATTERN"] == "a${b}"
        assert problems_of(*overrides) == []


def test_another_setting_may_refer_to_what_the_critic_has_from_the_trainer():
    found = load("critic.warmup_steps=${critic.trainer.parallel.tensor}")
    assert found.recipe.critic.warmup_steps == 2
    assert load("run.name=lr-${critic.trainer.optimizer.lr}").recipe.run.name == "lr-1e-06"


def test_a_number_out_of_range_that_the_critic_shares_is_said_once():
    assert problems_of("trainer.optimizer.min_lr=-1") == [("trainer.optimizer.min_lr", "-1: must be at least 0.")]
    said = "2.0 is above trainer.optimizer.lr -1.0."
    assert ("trainer.optimizer.min_lr", said) in problems_of("trainer.optimizer.lr=-1", "trainer.optimizer.min_lr=2")


def test_a_setting_that_the_trainer_lacks_is_missing_once():
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("recipe.yaml"), ["trainer.optimizer.lr=???", "critic.trainer.optimizer.lr=1e-5"])
    assert [problem.key for problem in caught.value.problems] == ["trainer.optimizer.lr"]
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("recipe.yaml"), ["trainer.optimizer.lr=???"])
    assert [problem.key for problem in caught.value.problems] == ["trainer.optimizer.lr"]


def test_ppo_has_no_problems_and_needs_one_sample_of_a_prompt():
    assert problems_of(*OWN, "critic.warmup_steps=2", "rollout.samples_per_prompt=1") == []


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ("algorithm.credit.turn_weights=[1,2]", "algorithm.credit.name",
         "trajectory: turns would differ, but a critic gives credit to each token. Use trajectory, without "
         "turn_weights."),
        ("algorithm.credit.name=turn", "algorithm.credit.name",
         "turn: turns would differ, but a critic gives credit to each token. Use trajectory, without "
         "turn_weights."),
        ("algorithm.selection.mode=best", "algorithm.selection.mode",
         "best gives every trajectory the advantage 1. Use all with a critic."),
        ("algorithm.loss=gspo", "algorithm.loss",
         "gspo is of whole sequences, and with a critic advantages differ by token. Use ppo."),
        ("critic.warmup_steps=3", "critic.warmup_steps", "3 leave none of the 3 steps to the policy."),
        ("critic.trainer.lora.rank=8", "critic.trainer.lora.rank",
         "a critic trains all of its weights and has no further layers. Leave it out."),
        ("trainer.lora.rank=8 critic.trainer.lora.rank=4", "critic.trainer.lora.rank",
         "a critic trains all of its weights and has no further layers. Leave it out."),
        ("critic.trainer.mtp.train=true", "critic.trainer.mtp.train",
         "a critic trains all of its weights and has no further layers. Leave it out."),
        ("rollout.prompts_per_step=4 trainer.updates_per_rollout=2 critic.trainer.updates_per_rollout=3",
         "critic.trainer.updates_per_rollout",
         "the critic learns from the policy's updates, trainer.updates_per_rollout 2. Leave it out."),
    ],
)  # fmt: skip
def test_what_contradicts_a_critic_is_refused(overrides: str, key: str, message: str):
    found = problems_of(*overrides.split())
    assert (key, message) in found
    assert {other for other, _ in found} == {key}


def test_a_policy_with_adapters_may_have_a_critic_which_has_none():
    found = load("trainer.lora.rank=8", "trainer.updates_per_rollout=2", "rollout.prompts_per_step=4")
    assert problems_of("trainer.lora.rank=8") == []
    critic = critic_recipe(found.recipe)
    assert (critic.trainer.lora, critic.trainer.mtp) == (LoraConfig(), MtpConfig())
    assert critic.trainer.updates_per_rollout == 2
    assert found.recipe.trainer.lora.rank == 8


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        ("critic.trainer.num_ranks=3",
         {"critic.trainer.num_ranks": "3 is not a multiple of tensor 2 x pipeline 1 x context 1 = 2. Use 2 or 4."}),
        ("trainer.num_ranks=3 critic.trainer.num_ranks=2",
         {"trainer.num_ranks": "3 is not a multiple of tensor 2 x pipeline 1 x context 1 = 2. Use 2 or 4."}),
        # Both in the same way, and each in its own.
        ("trainer.num_ranks=3",
         {"trainer.num_ranks": "3 is not a multiple of tensor 2 x pipeline 1 x context 1 = 2. Use 2 or 4."}),
        ("trainer.num_ranks=3 critic.trainer.num_ranks=5",
         {"trainer.num_ranks": "3 is not a multiple of tensor 2 x pipeline 1 x context 1 = 2. Use 2 or 4.",
          "critic.trainer.num_ranks": "5 is not a multiple of tensor 2 x pipeline 1 x context 1 = 2. Use 4 or 6."}),
        # Keys in a message are the critic's too.
        ("critic.trainer.parallel.virtual_pipeline=2",
         {"critic.trainer.parallel.virtual_pipeline": "needs critic.trainer.parallel.pipeline above 1."}),
        ("critic.trainer.num_ranks=24 critic.trainer.parallel.expert=12",
         {"critic.trainer.parallel.expert": "12 does not divide the model's 128 experts. Use 8."}),
        ("critic.trainer.max_tokens_per_rank=100",
         {"critic.trainer.max_tokens_per_rank":
          "100 x context 1 = 100 tokens cannot hold one sequence of rollout.max_trajectory_tokens 256 (padded 256). "
          "Use 256 or more."}),
        ("critic.trainer.megatron.recompute_method=uniform",
         {"critic.trainer.megatron.recompute_method": "uniform needs recompute_granularity: full."}),
        ("critic.trainer.fp8_emulation=true",
         {"critic.trainer.fp8_emulation": "has no effect with critic.trainer.fp8 off. Choose blockwise, as engines "
          "have it."}),
        ("critic.trainer.optimizer.min_lr=1",
         {"critic.trainer.optimizer.min_lr": "1.0 is above critic.trainer.optimizer.lr 1e-06."}),
        ("critic.trainer.env.OMP_NUM_THREADS=2",
         {"critic.trainer.env.OMP_NUM_THREADS": "is set by critic.trainer.threads_per_rank."}),
        ("critic.trainer.parallel.context=0", {"critic.trainer.parallel.context": "0: must be at least 1."}),
        ("trainer.parallel.context=0", {"trainer.parallel.context": "0: must be at least 1."}),
    ],
)  # fmt: skip
def test_rules_of_the_trainer_hold_for_the_critic_s_ranks_and_what_both_break_is_said_once(overrides, problems):
    found = problems_of(*overrides.split())
    assert dict(found) == problems
    assert len(found) == len(problems)


def test_a_rule_about_layers_that_a_critic_does_not_have_is_none_of_its_own():
    full = "megatron.recompute_granularity=full", "megatron.recompute_method=uniform", "megatron.recompute_num_layers=2"
    assert problems_of("trainer.mtp.train=true", *(f"critic.trainer.{part}" for part in full), model=None) == []
    ((key, message),) = problems_of("trainer.mtp.train=true", *(f"trainer.{part}" for part in full), model=None)
    assert (key, message[:11]) == ("trainer.megatron.recompute_num_layers", "2: layers f")


def test_a_field_that_a_setting_of_the_trainer_sets_is_refused_with_the_critic_s_setting():
    with pytest.raises(RecipeError) as caught:
        load("critic.trainer.megatron.tensor_model_parallel_size=2")
    (problem,) = caught.value.problems
    assert problem.key == "critic.trainer.megatron.tensor_model_parallel_size"
    assert problem.message == "is set by critic.trainer.parallel.tensor."


@pytest.mark.parametrize(
    "override",
    [
        *("critic.discount=0.9", "critic.gae_lambda=0.9", "critic.value_clip=0", "critic.warmup_steps=1"),
        *(override for override in OWN if "env" in override or "num_ranks" in override),
    ],
)
def test_settings_of_a_critic_that_is_not_there_are_refused(override: str):
    assert problems_of("algorithm.name=grpo") == []
    expected = "algorithm.advantage grpo has no critic. Set it to gae, or leave out the section critic."
    assert problems_of("algorithm.name=grpo", override) == [(override.partition("=")[0], expected)]


@pytest.mark.parametrize("command", [command for command, parts in NOT_NEEDED.items() if "critic" in parts])
def test_a_command_that_does_not_read_the_critic_refuses_none_of_its_settings(command):
    broken = ("critic.trainer.num_ranks=3", "critic.warmup_steps=3", "critic.trainer.lora.rank=8")
    for name in ("ppo", "grpo"):
        assert not [
            key for key, _ in problems_of(f"algorithm.name={name}", *broken, command=command) if "critic" in key
        ]


def test_the_commands_that_train_a_policy_read_the_critic():
    read = {command for command, parts in NOT_NEEDED.items() if "critic" not in parts}
    assert read == {"train", "train --trajectories"}
    for command in read:
        keys = [key for key, _ in problems_of("critic.trainer.num_ranks=3", "critic.warmup_steps=3", command=command)]
        assert keys == ["critic.warmup_steps", "critic.trainer.num_ranks"]
