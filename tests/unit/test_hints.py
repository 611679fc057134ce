"""Hints of unknown keys: names that other programs give a setting, and slips of the keyboard; never a mere likeness."""

import re

import pytest

from slimrl.config.aliases import ALIASES, alias_of
from slimrl.config.hints import meant_key
from slimrl.config.keys import KEY_TYPES, is_known
from slimrl.config.load import read_recipe

FIRST = re.compile(r"(?P<key>[\w.]+)(?:: (?P<value>\w+))?(?: \([^()]+\))?")


@pytest.mark.parametrize("meant", sorted(set(ALIASES.values())))
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
    assert [alias for alias in ALIASES if alias in names or alias in KEY_TYPES] == []


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
        ("max_tokens", "sft.max_tokens"),
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
        ("zebra", None),
    ],
)
def test_a_hint_names_what_was_meant_or_nothing(key: str, meant: str | None):
    assert meant_key(key) == meant


def test_the_longest_end_of_a_key_decides():
    assert alias_of("x.rollout.tp") == "rollout.engine_tp"
    assert alias_of("x.model.tp") == "trainer.parallel.tensor"
    assert alias_of("rollout.num_engines") is None
