"""Variables that a recipe gives to trainer and engine processes: they arrive; what slimrl sets itself is refused."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.check import check_recipe
from slimrl.config.env_vars import (
    ENGINE_OWNED,
    ENGINE_PINNED,
    TRAINER_OWNED,
    environment_violations,
    trainer_variables,
)
from slimrl.config.load import load_recipe
from slimrl.config.package_fields import package_folder
from slimrl.config.problems import RecipeError
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import ParallelConfig, TrainerConfig
from slimrl.engines.servers.server import engine_environment
from slimrl.runtime.cluster import trainer_actor, trainer_group
from slimrl.runtime.cluster.trainer_actor import TrainerActor
from slimrl.runtime.cluster.trainer_group import TrainerGroup

GIVEN = [
    "steps=3", "run.name=demo", "model.path=model", "data.train=train.jsonl", "reward.function=a.b:c",
    "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
    "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
    "rollout.eval_sampling.max_new_tokens=64", "sft.max_tokens=512",
]  # fmt: skip


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("")
    return path


def problems_of(path: Path, *overrides: str, command: str = "train") -> dict[str, str]:
    recipe = load_recipe(path, [*GIVEN, *overrides], command=command).recipe
    return {problem.key: problem.message for problem in check_recipe(recipe, None, command) if ".env" in problem.key}


def test_values_are_text_and_a_number_is_taken_as_it_is_written(recipe_file: Path):
    recipe_file.write_text("trainer:\n  env: {NCCL_DEBUG: INFO, NCCL_P2P_LEVEL: 5}\nrollout: {env: {A_B: 'true'}}\n")
    recipe = load_recipe(recipe_file, GIVEN).recipe
    assert recipe.trainer.env == {"NCCL_DEBUG": "INFO", "NCCL_P2P_LEVEL": "5"}
    assert recipe.rollout.env == {"A_B": "true"}
    recipe_file.write_text("rollout:\n  env:\n    A_B: true\n    C: null\n    D: [1]\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, GIVEN)
    lines = str(caught.value).splitlines()
    assert re.search(r"recipe.yaml:3: rollout.env.A_B: expected str, got True\.", lines[0])
    assert re.search(r"recipe.yaml:4: rollout.env.C: expected str, got null\.", lines[1])
    assert re.search(r"recipe.yaml:5: rollout.env.D: expected str, got \[1\]\.", lines[2])


def test_what_slimrl_sets_is_refused_with_what_sets_it(recipe_file: Path):
    assert problems_of(recipe_file, "trainer.env.NCCL_DEBUG=INFO", "rollout.env.NCCL_DEBUG=INFO") == {}
    assert problems_of(recipe_file, "trainer.env.OMP_NUM_THREADS=4", "rollout.env.OMP_NUM_THREADS=4") == {
        "trainer.env.OMP_NUM_THREADS": "is set by trainer.threads_per_rank.",
        "rollout.env.OMP_NUM_THREADS": "is set by rollout.threads_per_engine.",
    }
    gpus = "is set by slimrl, from the GPUs that Ray gives the process."
    assert problems_of(recipe_file, "trainer.env.CUDA_VISIBLE_DEVICES=4", command="sft") == {
        "trainer.env.CUDA_VISIBLE_DEVICES": gpus
    }
    assert problems_of(recipe_file, "trainer.env.RANK=1") == {"trainer.env.RANK": "is set by slimrl, for each rank."}
    refused = problems_of(recipe_file, "trainer.env.LD_PRELOAD=a.so", "trainer.env.A-B=1", "rollout.env.LD_PRELOAD=a")
    assert set(refused) == {"trainer.env.LD_PRELOAD", "trainer.env.A-B"}
    assert "Set it where Ray starts" in refused["trainer.env.LD_PRELOAD"]


def test_sections_that_a_command_does_not_start_processes_from_are_not_judged(recipe_file: Path):
    both = ("trainer.env.OMP_NUM_THREADS=4", "rollout.env.OMP_NUM_THREADS=4")
    assert set(problems_of(recipe_file, *both, command="sft")) == {"trainer.env.OMP_NUM_THREADS"}
    assert set(problems_of(recipe_file, *both, command="eval")) == {"rollout.env.OMP_NUM_THREADS"}


def test_everything_that_slimrl_sets_is_known_to_the_rule(recipe_file: Path):
    for colocated in (False, True):
        rollout = RolloutConfig(engine_tp=2, colocated=colocated)
        for cuda in (False, True):
            assert engine_environment(rollout, precision=Precision.fp32, cuda=cuda).keys() <= ENGINE_OWNED.keys()
    assert trainer_variables(Recipe(), {}).keys() <= TRAINER_OWNED.keys()
    tensor = ["trainer.num_ranks=2", "trainer.parallel.tensor=2", "trainer.env.CUDA_DEVICE_MAX_CONNECTIONS=8"]
    assert problems_of(recipe_file, *tensor) == {
        "trainer.env.CUDA_DEVICE_MAX_CONNECTIONS": (
            "is set by slimrl: with trainer.parallel.tensor 2 communication overlaps only with 1."
        )
    }
    assert problems_of(recipe_file, tensor[2]) == {}


@pytest.fixture
def sglang_variables(monkeypatch):
    """SGLang's own reader of variables."""
    environ = package_folder("sglang") / "srt" / "environ.py"
    spec = importlib.util.spec_from_file_location("sglang_environ", environ)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sglang_environ", module)
    spec.loader.exec_module(module)
    return module.envs


def test_indexers_of_sparse_attention_are_not_fused_whatever_the_shell_has(
    monkeypatch, sglang_variables, recipe_file: Path
):
    name = "SGLANG_DISABLE_DSA_INDEXER_FUSION"
    monkeypatch.setenv(name, "0")
    assert not getattr(sglang_variables, name).get()
    monkeypatch.setenv(name, engine_environment(RolloutConfig(), precision=Precision.bf16, cuda=True)[name])
    assert getattr(sglang_variables, name).get()
    (message,) = problems_of(recipe_file, f"rollout.env.{name}=0").values()
    assert message.startswith("is set by slimrl, to on:")
    # Where SGLang asks for it.
    indexer = package_folder("sglang") / "srt" / "layers" / "attention" / "dsa" / "dsa_indexer.py"
    assert f"and not envs.{name}.get()" in indexer.read_text()


def test_what_would_change_an_engine_s_answers_is_sglang_s_default_whatever_the_shell_has(
    monkeypatch, sglang_variables, recipe_file: Path
):
    """In a process that began with other values."""
    ours = engine_environment(RolloutConfig(), precision=Precision.fp32, cuda=True)
    for name in ENGINE_PINNED:
        field = getattr(sglang_variables, name)
        monkeypatch.delenv(name, raising=False)
        default = field.get()
        monkeypatch.setenv(name, {"SGLANG_SIMULATE_ACC_LEN": "4", "SGLANG_PLUGINS": "other"}.get(name, "1"))
        assert field.get() != default, name
        monkeypatch.setenv(name, ours[name])
        assert field.get() == default, name
    given = ["rollout.env.SGLANG_RETURN_ORIGINAL_LOGPROB='true'", "rollout.env.SGLANG_HTTP_SERVER_APP_PATH='a:b'"]
    refused = problems_of(recipe_file, *given)
    assert refused["rollout.env.SGLANG_RETURN_ORIGINAL_LOGPROB"] == (
        "is set by slimrl, to off: engines return log-probs of the distribution that they sample from."
    )
    assert "the shell alone" in refused["rollout.env.SGLANG_HTTP_SERVER_APP_PATH"]


def test_an_engine_s_process_gets_the_recipe_s_variables():
    rollout = RolloutConfig(env={"NCCL_DEBUG": "INFO"})
    assert engine_environment(rollout, precision=Precision.fp32, cuda=True)["NCCL_DEBUG"] == "INFO"


def test_a_trainer_s_process_sets_the_recipe_s_variables_itself_and_ray_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = Recipe(trainer=TrainerConfig(env={"SLIMRL_TEST_KEY": "secret"}, parallel=ParallelConfig(tensor=2)))
    asked = []
    actor_class = SimpleNamespace(
        options=lambda **given: asked.append(given) or SimpleNamespace(remote=lambda *arguments, critic: None)
    )
    monkeypatch.setattr(trainer_group, "RemoteTrainer", actor_class)
    slots = [SimpleNamespace(node=SimpleNamespace(name="a"))]
    places = SimpleNamespace(placement=SimpleNamespace(ranks=slots), options=lambda slot, variables: dict(variables))
    TrainerGroup(recipe, SimpleNamespace(log_file=Path), None, places, total_updates=1)
    assert asked == [{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}]

    monkeypatch.setattr(trainer_actor, "capture_output", lambda path: None)
    monkeypatch.setattr(trainer_actor, "clean_stale_segments", lambda: None)
    monkeypatch.setenv("SLIMRL_TEST_KEY", "")
    monkeypatch.chdir(tmp_path)
    TrainerActor(recipe, tmp_path / "log", tmp_path, 0, "a", 1)
    assert os.environ["SLIMRL_TEST_KEY"] == "secret"


def test_only_tensor_parallel_ranks_launch_through_one_queue():
    """Kernels of other ranks need no order, and two streams overlap better through several queues."""
    recipes = [Recipe(trainer=TrainerConfig(parallel=ParallelConfig(tensor=size))) for size in (1, 2)]
    found = [trainer_variables(recipe, {}) for recipe in recipes]
    assert [variables.get("CUDA_DEVICE_MAX_CONNECTIONS") for variables in found] == [None, "1"]


def test_what_nccl_needs_alike_at_both_ends_is_no_recipes_to_set_for_one():
    recipe = Recipe(trainer=TrainerConfig(env={"NCCL_NVLS_ENABLE": "1"}))
    assert list(environment_violations(recipe, trainer=True, engines=True)) == []
    recipe.resync.transport = TransportName.p2p
    ((key, message),) = environment_violations(recipe, trainer=True, engines=True)
    assert key == "trainer.env.NCCL_NVLS_ENABLE"
    assert message.endswith("Set it where slimrl is started.")
    recipe.trainer.env, recipe.rollout.env = {}, {"NCCL_CUMEM_ENABLE": "1"}
    assert [key for key, _ in environment_violations(recipe, trainer=True, engines=True)] == [
        "rollout.env.NCCL_CUMEM_ENABLE"
    ]
