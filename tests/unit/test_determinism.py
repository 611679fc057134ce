"""`deterministic: true` on a GPU: what torch, Megatron and SGLang are told. On a CPU they repeat as they are."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimrl import device
from slimrl.config.check import check_recipe
from slimrl.config.env_vars import trainer_variables
from slimrl.config.load import load_recipe
from slimrl.config.schema.model import ModelConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.engines.servers.server import engine_arguments
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.runtime.cluster import engine_actor
from slimrl.runtime.cluster.engine_actor import EngineActor
from slimrl.runtime.cluster.trainer_actor import TrainerActor
from slimrl.trainer import determinism
from slimrl.trainer.build import transformer_config

MODEL = MegatronModelConfig(
    transformer={"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4},
    multi_latent_attention=False,
    vocab_size=128,
    max_position=64,
    rotary_base=10000,
    rotary_percent=1.0,
    tie_embeddings=False,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    return calls


def test_on_a_gpu_torch_and_megatron_are_told(asked: list[bool], monkeypatch: pytest.MonkeyPatch):
    given = TrainerConfig(precision=Precision.fp32, megatron={"moe_router_topk": 2})
    monkeypatch.setattr(determinism.device, "device_type", lambda: "cuda")
    made = determinism.make_deterministic(given)
    monkeypatch.undo()
    assert asked == [True]
    config = transformer_config(made, MODEL)
    assert (config.deterministic_mode, config.moe_router_topk) == (True, 2)
    assert transformer_config(given, MODEL).deterministic_mode is False


def test_on_a_cpu_nothing_changes(asked: list[bool]):
    assert device.device_type() == "cpu"
    given = TrainerConfig()
    assert determinism.make_deterministic(given) is given
    assert asked == []
    rollout = RolloutConfig(max_trajectory_tokens=100)
    how = {"host": "h", "port": 7, "precision": Precision.fp32, "seed": 5}
    cpu = [engine_arguments(rollout, "m", **how, cuda=False, deterministic=value) for value in (False, True)]
    assert cpu[0] == cpu[1]
    cuda = [engine_arguments(rollout, "m", **how, cuda=True, deterministic=value) for value in (False, True)]
    assert ["--enable-deterministic-inference" in words for words in cuda] == [False, True]


def test_processes_have_the_variables_of_the_libraries():
    added = trainer_variables(Recipe(deterministic=True), {}).items() - trainer_variables(Recipe(), {}).items()
    assert dict(added) == {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    }


def test_actors_pass_it_on(monkeypatch: pytest.MonkeyPatch):
    made: list[dict] = []

    def server(*given, **how):
        made.append(how)
        return SimpleNamespace(wait_ready=lambda: None, url="http://h:1", process=SimpleNamespace(pid=1))

    monkeypatch.setattr(engine_actor, "EngineServer", server)
    monkeypatch.setattr(engine_actor, "SglangControl", lambda *given, **how: None)
    for deterministic in (False, True):  # and whether the model's code is trusted, the other way round
        actor = object.__new__(EngineActor)
        actor.recipe = Recipe(deterministic=deterministic, model=ModelConfig(trust_remote_code=not deterministic))
        actor.index, actor.part, actor.starts, actor.node = 0, 0, 0, SimpleNamespace(address="h", name="n")
        actor.role, actor._key = "engine", None
        actor.logs = Path("logs")
        actor.start()

    assert [how["trust_remote_code"] for how in made] == [True, False]

    def worker(*given, **how):
        made.append(how)
        return SimpleNamespace(runner=SimpleNamespace(), layout=None)

    monkeypatch.setattr("slimrl.trainer.worker.TrainerWorker", worker)
    for deterministic in (False, True):
        rank = object.__new__(TrainerActor)
        rank.recipe, rank.rank, rank.total_updates = Recipe(deterministic=deterministic), 0, 1
        rank.is_critic = not deterministic
        rank.start("tcp://h:1")
    assert [how["deterministic"] for how in made] == [False, True, False, True]
    assert [how["critic"] for how in made[2:]] == [True, False]


@pytest.mark.parametrize(
    "key", ["trainer.megatron.deterministic_mode", "rollout.sglang.enable_deterministic_inference"]
)
def test_a_recipe_cannot_switch_off_what_it_needs(tmp_path, key: str):
    (tmp_path / "recipe.yaml").write_text("")
    given = ["steps=3", "run.name=demo", "model.path=m", "data.train=t.jsonl", "reward.function=a.b:c",
             "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
             "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
             "rollout.eval_sampling.max_new_tokens=64", f"{key}=false"]  # fmt: skip
    for deterministic in (False, True):
        recipe = load_recipe(tmp_path / "recipe.yaml", [*given, f"deterministic={deterministic}".lower()]).recipe
        assert (key in [problem.key for problem in check_recipe(recipe, None, "train")]) is deterministic
