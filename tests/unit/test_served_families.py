"""A model is refused, in one sentence, where SGLang would serve another one than its config.json describes."""

import json
from types import SimpleNamespace

import pytest
from slimrl_tools.toy.toy import write_toy

from slimrl.config.problems import Problem
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.models.hf_config import read_hf_config
from slimrl.runtime.checks.model_check import model_problems
from slimrl.toys.toy_configs import ToySize

SIZE = ToySize(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, experts=2, moe_intermediate=16)


def problems(path, command: str, **rollout) -> list[str]:
    recipe = SimpleNamespace(
        rollout=RolloutConfig(**rollout),
        deterministic=False,
        has_critic=False,
        model=SimpleNamespace(path=str(path), megatron=None),
        trainer=TrainerConfig(precision=Precision.fp32),
        resync=SimpleNamespace(bucket_bytes=10**9, transport=TransportName.ipc),
    )
    loaded = SimpleNamespace(
        recipe=recipe, command=command, problem=lambda key, message: Problem(key=key, message=message)
    )
    return [f"{problem.key}: {problem.message}" for problem in model_problems(loaded, devices=False)]


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("minimax_m2", "use_qk_norm"),
        ("hy_v3", "route_norm"),
        ("deepseek_v3", "moe_layer_freq"),
        ("deepseek_v32", "scoring_func"),
        ("glm_moe_dsa", "indexer_rope_interleave"),
    ],
)
def test_a_config_without_a_key_that_sglang_needs_is_refused_where_engines_start(tmp_path, family, key):
    path = tmp_path / "toy"
    write_toy(family, path, SIZE, 0)
    assert problems(path, "rollout") == []
    config = read_hf_config(path)
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != key}))
    missing = f'"{key}": {json.dumps(config[key])}'
    says = f"model.path: SGLang takes other values than those of this {family}. Set {missing} in config.json too."
    assert problems(path, "rollout") == [says]
    assert problems(path, "sft") == []


def test_groups_of_ranks_are_refused_for_a_model_that_sglang_shards_over_all_of_them(tmp_path):
    for family in ("hy_v3", "minimax_m2"):
        write_toy(family, tmp_path / family, SIZE, 0)
    groups = {"engine_tp": 2, "engine_attention_dp": 2}
    for command in ("train", "eval"):
        assert problems(tmp_path / "hy_v3", command, **groups) == [
            "rollout.engine_attention_dp: 2: SGLang shards attention of hy_v3 over all ranks of an engine. Use 1."
        ]
    assert problems(tmp_path / "minimax_m2", "train", **groups) == []
    assert problems(tmp_path / "hy_v3", "sft", **groups) == []
